/* route_v16.inc.h - the router's scores and groups over vectors of 16 floats: included after kernels_v16.inc.h, whose exponential and columns it uses. Equal
 * bit by bit to kernels_generic.c. */

/* ---------------------------------------------------------------- scores */

V16 v16 sigmoid16(v16 z) { return v16_div(v16_set1(1.0f), v16_add(v16_set1(1.0f), v16_exp(v16_neg(z)))); }

V16 v16 sqrt_softplus16(v16 z) {
  v16 magnitude = v16_and(z, 0x7fffffffu), u = v16_exp(v16_neg(magnitude)), p = v16_set1(colibri_log1p_terms[0]);
  for (int i = 1; i < COLIBRI_LOG1P_TERMS; i++) p = v16_fma(p, u, v16_set1(colibri_log1p_terms[i]));
  return v16_sqrt(v16_fma(p, u, v16_max(z, v16_set1(0.0f))));
}

/* Where logits count one by one; score is a constant. */
V16 v16 score16(const int score, v16 z) {
  return score == COLIBRI_SCORE_SIGMOID ? sigmoid16(z) : score == COLIBRI_SCORE_SQRT_SOFTPLUS ? sqrt_softplus16(z) : z;
}

V16 int score_row(const int score, const float *z, int n, float *y) {
  v16 poison = v16_set1(0.0f);
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    v16 v = v16_load(z + i);
    poison = v16_poison(v, poison);
    v16_store(y + i, score16(score, v));
  }
  if (i < n) {
    v16 v = v16_load_n(z + i, n - i);
    poison = v16_poison(v, poison);
    v16_store_n(y + i, score16(score, v), n - i);
  }
  return v16_is_nan(poison) != 0;
}

static int softmax_row(const float *z, int n, float *y) {
  v16 top = v16_set1(-INFINITY), poison = v16_set1(0.0f), sum = v16_set1(0.0f);
  int i = 0, whole = n / 16 * 16, tail = n % 16;
  for (; i < whole; i += 16) {
    v16 v = v16_load(z + i);
    poison = v16_poison(v, poison);
    top = v16_max(v, top);
  }
  if (tail) {
    v16 v = v16_load_n(z + i, tail);
    poison = v16_poison(v, poison);
    top = v16_first(tail, v16_max(v, top), top);
  }
  v16 shift = v16_set1(v16_top(top));
  for (i = 0; i < whole; i += 16) {
    v16 e = v16_exp(v16_sub(v16_load(z + i), shift));
    sum = v16_add(sum, e);
    v16_store(y + i, e);
  }
  if (tail) {
    v16 e = v16_exp(v16_sub(v16_load_n(z + i, tail), shift));
    sum = v16_first(tail, v16_add(sum, e), sum);
    v16_store_n(y + i, e, tail);
  }
  v16 inverse = v16_set1(1.0f / v16_fold(sum));
  for (i = 0; i < whole; i += 16) v16_store(y + i, v16_mul(v16_load(y + i), inverse));
  if (tail) v16_store_n(y + i, v16_mul(v16_load_n(y + i, tail), inverse), tail);
  return v16_is_nan(poison) != 0;
}

static void scores(int score, const float *z, ptrdiff_t ld, int experts, int n, float *y, uint8_t *bad) {
  for (int t = 0; t < n; t++, z += ld, y += experts) switch (score) {
      case COLIBRI_SCORE_SOFTMAX_ALL: bad[t] = (uint8_t)softmax_row(z, experts, y); break;
      case COLIBRI_SCORE_SIGMOID: bad[t] = (uint8_t)score_row(COLIBRI_SCORE_SIGMOID, z, experts, y); break;
      case COLIBRI_SCORE_SQRT_SOFTPLUS: bad[t] = (uint8_t)score_row(COLIBRI_SCORE_SQRT_SOFTPLUS, z, experts, y); break;
      default: bad[t] = (uint8_t)score_row(COLIBRI_SCORE_LOGITS, z, experts, y); break;
    }
}

/* ---------------------------------------------------------------- groups */

/* 16 tokens' n <= 8 neighbouring scores, a column each: joins them to the two largest so far. */
V16 void join_columns(const float *s, ptrdiff_t ld, int n, v16 *first, v16 *second) {
  v16 column[8];
  v16_columns8(s, ld, n, column);
  for (int i = 0; i < n; i++) {
    *second = v16_max(*second, v16_min(*first, column[i]));
    *first = v16_max(*first, column[i]);
  }
}

/* One group of 16 tokens, from s with row stride ld. */
V16 v16 group_metric(const float *s, ptrdiff_t ld, int size, int sum_top2) {
  v16 first = v16_set1(-INFINITY), second = first;
  int e = 0;
  for (; e + 8 <= size; e += 8) join_columns(s + e, ld, 8, &first, &second);
  if (e < size) join_columns(s + e, ld, size - e, &first, &second);
  return sum_top2 ? v16_add(first, second) : first;
}

static void group_best(const float *s, int size, int groups, int n, int sum_top2, float *metric) {
  ptrdiff_t ld = (ptrdiff_t)size * groups;
  float of_group[16];
  for (; n >= 16; n -= 16, s += 16 * ld, metric += 16 * groups)
    for (int g = 0; g < groups; g++) {
      v16_store(of_group, group_metric(s + (ptrdiff_t)g * size, ld, size, sum_top2));
      for (int t = 0; t < 16; t++) metric[t * groups + g] = of_group[t];
    }
  if (n) colibri_kernels_generic()->group_best(s, size, groups, n, sum_top2, metric);
}
