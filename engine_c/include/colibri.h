/* colibri.h - public C interface of the Colibri engine.
 *
 * The engine runs a mixture-of-experts transformer on CPUs. Three objects:
 *
 *   colibri_model    an opened `.colibri` container: immutable, mapped read-only, shareable by any number of threads.
 *   colibri_session  the front end's side of a team: KV cache, activations, the lanes that compute. One owner thread steps it.
 *   colibri_worker   a lane's side of the same team, usually in another process, attached through two file descriptors.
 *
 * Conventions
 *   - Functions return COLIBRI_OK (0) or a negative enum colibri_status. A non-NULL colibri_error then holds the sentence.
 *   - The library never prints, never exits and never asserts on input.
 *   - Every *_close accepts NULL.
 *   - Unless said otherwise a function is safe to call from one thread at a time per object.
 *   - Sizes named *_bytes are bytes, counts are elements; matrices are row-major [rows, columns].
 *
 * Licence: Apache-2.0. */
#ifndef COLIBRI_H
#define COLIBRI_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define COLIBRI_API __attribute__((visibility("default")))
#else
#define COLIBRI_API
#endif

#define COLIBRI_ABI_VERSION 4
#define COLIBRI_KV_BLOCK 16      /* tokens of one KV block */
#define COLIBRI_MAX_TOP_LOGPROBS 20
#define COLIBRI_MAX_NODES 1024   /* NUMA node numbers are 0..1023 */
#define COLIBRI_OPS 14           /* enum colibri_operation */

/* ---------------------------------------------------------------- errors */

enum colibri_status {
  COLIBRI_NEEDS_REMOTE = 1, /* no error: a step stands in a layer and wants experts' outputs from elsewhere */
  COLIBRI_OK = 0,
  COLIBRI_EINVAL = -1,     /* an argument is out of its range */
  COLIBRI_EIO = -2,        /* the operating system refused a file or mapping operation */
  COLIBRI_EFORMAT = -3,    /* the container is malformed, truncated or of another version */
  COLIBRI_ENOMEM = -4,     /* memory could not be had */
  COLIBRI_EUNSUPPORTED = -5, /* the model needs a feature, or names an ISA, that this build or CPU lacks */
  COLIBRI_ENUMERIC = -6,   /* a NaN or infinity where a number was needed */
  COLIBRI_ENOLANES = -7,   /* nothing is left that could compute */
  COLIBRI_ESTATE = -8      /* the object is not in a state that allows the call */
};

typedef struct colibri_error {
  int32_t code;            /* enum colibri_status */
  char message[256];       /* one sentence, NUL terminated */
} colibri_error;

/* Version of the library as "major.minor.patch". Never NULL; any thread. */
COLIBRI_API const char *colibri_version(void);

/* ---------------------------------------------------------------- instruction sets */

/* Selects the kernels of this process: "generic", "avx2", "avx512", "neon"; NULL takes COLIBRI_ISA from the environment or,
 * if unset, the best this CPU and operating system can run. Unknown or unavailable names give COLIBRI_EUNSUPPORTED.
 * Call it before other threads use the engine; the first model or session call does it with NULL. */
COLIBRI_API int colibri_isa_select(const char *name, colibri_error *err);
/* The selected instruction set, e.g. "avx512". Any thread. */
COLIBRI_API const char *colibri_isa_name(void);
/* Comma-separated list of all sets this CPU can run, best first. Any thread. */
COLIBRI_API const char *colibri_isa_available(void);

/* ---------------------------------------------------------------- weight formats and packing */

enum colibri_format {
  COLIBRI_F32 = 0,
  COLIBRI_BF16 = 1,
  COLIBRI_INT8 = 2,        /* symmetric, one fp16 scale per row and 32 columns */
  COLIBRI_INT4 = 3,        /* symmetric, one fp16 scale per row and 32 columns */
  COLIBRI_FORMATS = 4
};

/* Bytes of a packed "P32" matrix [n, k] in `format`: rows and columns are padded to 32, panels of 32 rows, blocks of 32 columns
 * (docs/container.md). 0 if an argument is out of range or the size overflows. Any thread. */
COLIBRI_API uint64_t colibri_packed_bytes(int format, int64_t n, int64_t k);
/* Bytes of one packed expert block: fused gate/up [2*ffn, hidden] followed by down [hidden, ffn]. 0 on bad arguments. Any thread. */
COLIBRI_API uint64_t colibri_expert_bytes(int format, int64_t hidden, int64_t ffn);
/* Packs w [n, k] f32 into dst (colibri_packed_bytes). Non-finite weights give COLIBRI_ENUMERIC. Any thread. */
COLIBRI_API int colibri_pack(int format, const float *w, int64_t n, int64_t k, void *dst, colibri_error *err);
/* Packs one expert: gate [ffn, hidden], up [ffn, hidden], down [hidden, ffn], all f32, into dst (colibri_expert_bytes). Any thread. */
COLIBRI_API int colibri_pack_expert(int format, const float *gate, const float *up, const float *down, int64_t hidden, int64_t ffn,
                                    void *dst, colibri_error *err);
/* The inverse of colibri_pack, dequantised: src -> w [n, k] f32. Any thread. */
COLIBRI_API int colibri_unpack(int format, const void *src, int64_t n, int64_t k, float *w, colibri_error *err);
/* The inverse of colibri_pack_expert, dequantised. Any thread. */
COLIBRI_API int colibri_unpack_expert(int format, const void *src, int64_t hidden, int64_t ffn, float *gate, float *up, float *down,
                                      colibri_error *err);

/* ---------------------------------------------------------------- model */

typedef struct colibri_model colibri_model;

/* Scalars of an opened model. All counts; floats are what their names say. */
typedef struct colibri_model_info {
  int32_t vocab, hidden, layers, heads, kv_heads, head_dim, ffn;
  int32_t experts, top_k;        /* a dense model is one expert, top_k 1, no router */
  int32_t max_context;           /* tokens */
  int32_t sliding_window;        /* tokens a query sees, itself included; 0 = all */
  int32_t router_layers;         /* layers that have a router */
  int32_t tied_head;             /* 1 if the head is the embedding */
  int32_t expert_format, backbone_format, head_format; /* enum colibri_format */
  float norm_eps, attention_scale;
  uint64_t file_bytes, expert_bytes, backbone_bytes;
  uint64_t active_bytes;         /* weight bytes one token reads: backbone without embedding, head, top_k experts a layer */
} colibri_model_info;

/* Opens a container by path or by descriptor (the descriptor is duplicated, not consumed; a sealed memfd will do). Maps it read-only,
 * checks header and tensor table against the file's size; tensor checksums are not read (see `colibri verify`).
 * *out is the caller's, to be closed. COLIBRI_EIO, COLIBRI_EFORMAT, COLIBRI_EUNSUPPORTED, COLIBRI_ENOMEM. */
COLIBRI_API int colibri_model_open(const char *path, colibri_model **out, colibri_error *err);
COLIBRI_API int colibri_model_open_fd(int fd, colibri_model **out, colibri_error *err);

/* A piece of a container: bytes [offset, offset + bytes) of it, found at the same offset of fd (so each node's memfd is a sparse file of the
 * container's size). node: the NUMA node that holds these bytes, 0..COLIBRI_MAX_NODES-1; -1: none in particular. */
typedef struct colibri_part {
  int32_t fd, node;
  uint64_t offset, bytes;
} colibri_part;

/* Opens a container of n parts that cover it: ascending, without gap or overlap, from byte 0, each starting at a page and but for the last ending
 * at one. They are mapped side by side, so that everything lies where it lies in one file; colibri_model_open_fd is the one-part case. parts and the
 * descriptors stay the caller's. With two nodes or more, tasks have a home node and lanes take those of their own node first (colibri_lane_place);
 * results do not depend on it. Errors as colibri_model_open; COLIBRI_EINVAL for parts that do not fit together, COLIBRI_ENOMEM for more than
 * the kernel maps (vm.max_map_count). */
COLIBRI_API int colibri_model_open_parts(const colibri_part *parts, int32_t n, colibri_model **out, colibri_error *err);
/* Says on which n nodes an expert lies, once its pages have been moved there or copies been made (colibri_model_remap): its tasks are then at home on the
 * one of them that has least to do in the phase. n 0: as the parts say. Any thread, also while steps run: holds from the next phase on, and changes who
 * computes, never a result. COLIBRI_EINVAL for a layer, an expert or a node that the model has not, or fewer than two nodes; COLIBRI_EUNSUPPORTED with more
 * than 64 nodes. */
COLIBRI_API int colibri_model_place(colibri_model *model, int32_t layer, int32_t expert, const int32_t *nodes, int32_t n, colibri_error *err);
/* Maps the bytes of a part from another descriptor, in place of what they were mapped from, in this process only. It must hold the same bytes: then threads
 * may read them meanwhile. The pages are mapped before the exchange, which is one system call; those of a part on no node in particular (-1) when they
 * are read, so that mapping a file anew gives up what was mapped of it. Any thread. On an error everything is as it was: COLIBRI_EINVAL, COLIBRI_EIO,
 * COLIBRI_EFORMAT, COLIBRI_ENOMEM. */
COLIBRI_API int colibri_model_remap(colibri_model *model, const colibri_part *part, colibri_error *err);
/* Checks a container image in memory, header, descriptor and tensor table, without keeping anything (fuzz entry). */
COLIBRI_API int colibri_model_check(const void *data, size_t size, colibri_error *err);
COLIBRI_API void colibri_model_close(colibri_model *model);
/* Valid until the model is closed. Any thread. */
COLIBRI_API const colibri_model_info *colibri_model_get_info(const colibri_model *model);

/* ---------------------------------------------------------------- router: gate logits to experts and weights */

#define COLIBRI_MAX_EXPERTS 1024
#define COLIBRI_MAX_TOP_K 64

enum colibri_router_score { COLIBRI_SCORE_SOFTMAX_ALL = 0, COLIBRI_SCORE_SIGMOID = 1, COLIBRI_SCORE_SQRT_SOFTPLUS = 2, COLIBRI_SCORE_LOGITS = 3 };
enum colibri_router_weight {
  COLIBRI_WEIGHT_SOFTMAX_CHOSEN = 0, /* softmax over the chosen experts' logits */
  COLIBRI_WEIGHT_SCORE = 1,          /* the chosen expert's score, without selection bias */
  COLIBRI_WEIGHT_SPARSEMIXER = 2,    /* softmax over the logits near the chosen one's, those chosen before it left out */
  COLIBRI_WEIGHT_SIGMOID_CHOSEN = 3  /* sigmoid of the chosen expert's logit */
};
enum colibri_router_group_metric { COLIBRI_GROUP_BY_MAX = 0, COLIBRI_GROUP_BY_SUM_TOP2 = 1 };
enum colibri_router_group_mask { COLIBRI_GROUP_MASK_ZERO = 0, COLIBRI_GROUP_MASK_MINUS_INF = 1 };
enum colibri_router_renorm { COLIBRI_RENORM_NONE = 0, COLIBRI_RENORM_SUM = 1 };
enum colibri_router_eps { COLIBRI_EPS_ADD = 0, COLIBRI_EPS_CLAMP = 1 };
enum colibri_router_apply { COLIBRI_APPLY_OUTPUT = 0, COLIBRI_APPLY_INPUT = 1 };
enum colibri_router_input { COLIBRI_ROUTER_NORMED = 0, COLIBRI_ROUTER_RESIDUAL = 1 };

/* How gate logits become experts and weights, for every family (docs/container.md, "Router"). Zero is each field's plainest value, but for
 * experts, k and scale. */
typedef struct colibri_router_desc {
  int32_t experts, k;      /* 1 <= k <= experts <= COLIBRI_MAX_EXPERTS, k <= COLIBRI_MAX_TOP_K */
  int32_t score, weight;   /* enums above */
  int32_t n_group;         /* groups of experts / n_group neighbours, of which topk_group are kept; 0 or 1: none */
  int32_t topk_group;
  int32_t group_metric, group_mask;
  int32_t renorm;          /* weights divided by their sum */
  int32_t renorm_way;      /* enum colibri_router_eps: renorm_eps is added to the sum, or is what the sum is at least */
  int32_t apply_at, input; /* what the weight multiplies; what the gate reads: for the engine's own steps */
  float renorm_eps;
  float scale;             /* applied last */
  float jitter_eps;        /* sparsemixer */
} colibri_router_desc;

/* Routes n tokens by their gate logits z [n, ld], ld >= experts: ids and weights [n, k] by descending selection score, ties to the lower index. select_bias
 * and expert_scale are [experts] or NULL; the logits' own bias is the caller's to add. bad [n] becomes 1 for a token with a NaN or infinite logit, or
 * whose scores or weights overflow: it gets experts 0..k-1 with weight 0 and disturbs no other; else 0. COLIBRI_EINVAL for a descriptor that makes no
 * sense; the sentence names the field. Any thread. */
COLIBRI_API int colibri_route_logits(const colibri_router_desc *desc, const float *select_bias, const float *expert_scale, const float *z, int ld, int n,
                                     int32_t *ids, float *weights, uint8_t *bad, colibri_error *err);

/* ---------------------------------------------------------------- session: the front end's side of a team */

typedef struct colibri_session colibri_session;

enum colibri_kv_format { COLIBRI_KV_F32 = 0, COLIBRI_KV_BF16 = 1 };

typedef struct colibri_session_options {
  int32_t max_rows;        /* rows (tokens) of one step, 1..65536 */
  int32_t max_seqs;        /* sequences of one step, 1..4096 */
  int32_t max_logit_rows;  /* rows of one step whose logits are wanted, 1..max_rows */
  int32_t kv_blocks;       /* KV blocks of COLIBRI_KV_BLOCK tokens in the pool */
  int32_t kv_format;       /* enum colibri_kv_format */
  int32_t max_lanes;       /* worker lanes the team has room for, 0..255 */
  int32_t front_lane;      /* 1: the stepping thread computes while it waits; needed if no worker is to come */
  int32_t spin_us;         /* a lane spins this long for work before it sleeps */
  int32_t hang_ms;         /* a lane holding a task longer than this is killed and its task run again; 0 = never */
  int32_t trace_routes;    /* 1: keep every row's experts, weights and margins for colibri_session_routes */
  int32_t split_down;      /* 1: an expert's down product is tasks of that expert alone, for weights that hold whole experts on a node; the weighted
                            * sum is an operation of its own. Same bits; costs max_rows * top_k rows of output in the arena */
  int32_t max_slots;       /* sequences that can have routing state at a time, 0..65536; 0: no damping of scope sequence, no counts of runs */
} colibri_session_options;

/* Bytes of shared memory a session with these options needs (team + arena). 0 if the options are out of range. */
COLIBRI_API uint64_t colibri_session_bytes(const colibri_model *model, const colibri_session_options *options);
/* Makes the team and arena segments (sealed against resizing) and the front end's lane. The model must outlive the session. */
COLIBRI_API int colibri_session_open(const colibri_model *model, const colibri_session_options *options, colibri_session **out,
                                     colibri_error *err);
COLIBRI_API void colibri_session_close(colibri_session *session);
/* Descriptors to hand to workers (inherited or by SCM_RIGHTS). They stay the session's. */
COLIBRI_API int colibri_session_team_fd(const colibri_session *session);
COLIBRI_API int colibri_session_arena_fd(const colibri_session *session);
/* Where the arena keeps one KV head's keys and values, of all layers and blocks: bytes at offset in the arena segment, starting at a multiple of 4096
 * (of 2 MiB if it is that large), so that memory policy can put each head on a node. Any thread. COLIBRI_EINVAL. */
COLIBRI_API int colibri_session_kv_range(const colibri_session *session, int kv_head, uint64_t *offset, uint64_t *bytes);

/* Lanes. A lane is EMPTY until its worker attaches (READY), computes from the next step on (ACTIVE), is LEAVING once asked to, and DEAD
 * when its process is known to have ended. These may be called from any thread, also while a step runs. */
enum colibri_lane_state { COLIBRI_LANE_EMPTY = 0, COLIBRI_LANE_READY = 1, COLIBRI_LANE_ACTIVE = 2, COLIBRI_LANE_LEAVING = 3,
                          COLIBRI_LANE_DEAD = 4 };
/* Binds a lane to the process that will run it, before it attaches: pid and a pidfd (duplicated by the session). pidfd -1: the lane is
 * a thread of this process and is never killed. COLIBRI_ESTATE unless the lane is EMPTY or DEAD. */
COLIBRI_API int colibri_lane_bind(colibri_session *session, int lane, int pid, int pidfd, colibri_error *err);
/* Asks a lane to leave at the next step boundary (or at once if no step runs). Its thread returns from colibri_worker_run. A lane that is EMPTY
 * or DEAD is left alone: wait until it is READY before asking, or ask again. */
COLIBRI_API int colibri_lane_leave(colibri_session *session, int lane);
/* Says that a lane's process has ended and been seen to end; what it had claimed is run again. The lane becomes EMPTY. */
COLIBRI_API int colibri_lane_dead(colibri_session *session, int lane);
/* enum colibri_lane_state of a lane, or COLIBRI_EINVAL. */
COLIBRI_API int colibri_lane_get_state(const colibri_session *session, int lane);
/* Milliseconds that the lane's process had held up a phase when a step killed it for that (hang_ms), 0 if none did; operation and layer, which
 * get what it was doing then, may be NULL. Kept until the lane is bound again. Any thread. */
COLIBRI_API int colibri_lane_hung(colibri_session *session, int lane, int32_t *operation, int32_t *layer);
/* Tasks a lane has completed since it attached. */
COLIBRI_API uint64_t colibri_lane_tasks(const colibri_session *session, int lane);
/* Says on which NUMA node a lane runs; -1: unknown, which is how they start. lane max_lanes is the front end's own. Holds from the next step on, for
 * whichever process has the lane, until it is said anew: say it before the lane attaches. COLIBRI_EINVAL. */
COLIBRI_API int colibri_lane_place(colibri_session *session, int lane, int node);
/* Tasks with a home node that a lane (max_lanes: the front end's own) has completed, and those of them whose home is the lane's node. Counted since
 * the session was opened, whoever had the lane. */
COLIBRI_API uint64_t colibri_lane_homed(const colibri_session *session, int lane);
COLIBRI_API uint64_t colibri_lane_local(const colibri_session *session, int lane);

/* ---------------------------------------------------------------- one step */

typedef struct colibri_sampling {
  float temperature;        /* 0: greedy */
  float top_p;              /* (0, 1]; 1 = off */
  float min_p;              /* [0, 1); 0 = off */
  float repetition_penalty; /* > 0; 1 = off. Positive logits of tokens in history are divided by it, negative multiplied (CTRL) */
  int32_t top_k;            /* 0 = off */
  int32_t top_logprobs;     /* 0..COLIBRI_MAX_TOP_LOGPROBS most likely tokens to report; -1: not even the token's own logprob (0 then; cheapest) */
  uint64_t seed;            /* the token at position p depends on (logits, parameters, seed, p) alone */
} colibri_sampling;

/* One sequence's share of a step. Sequences' rows, blocks, history and targets follow each other in the batch's flat arrays. */
typedef struct colibri_seq {
  int32_t n_rows;          /* tokens to run now, >= 1 */
  int32_t start;           /* position of the first of them = tokens already in the KV cache */
  int32_t n_logits;        /* the last n_logits rows get logits, are sampled and reported; 0 for an unfinished prefill */
  int32_t n_blocks;        /* KV blocks, at least ceil((start + n_rows) / COLIBRI_KV_BLOCK) */
  int32_t n_history;       /* tokens the repetition penalty looks at; 0 if it is off */
  int32_t slot;            /* routing state of the sequence, 0..max_slots-1, one sequence's in a step; -1: none. Made anew when start is 0 */
  int32_t damping;         /* index into the batch's dampings; -1: none */
  int32_t margins;         /* 1: margins of its rows are wanted (colibri_session_routes) */
  colibri_sampling sampling;
} colibri_seq;

/* ---- damping: what may be done about experts that get too many tokens. An expert is given up only for one whose selection score (gate logit, or score with
 * its selection bias where the model selects by that) lies at most `margin` below its own; weights are those the experts' undamped scores give.
 * Rows of sequences without damping are never changed, nor are rows with a NaN. Formulas: damping.h. */
enum colibri_damping_kind { COLIBRI_DAMPING_OFF = 0, COLIBRI_DAMPING_HEAT = 1, COLIBRI_DAMPING_CAPACITY = 2, COLIBRI_DAMPING_REUSE = 3 };
/* SEQUENCE: the outcome depends on the sequence's own tokens alone, in their order: not on how they are cut into steps, nor on other sequences. Needs a slot.
 * BATCH: tokens of one step are weighed against each other. */
enum colibri_damping_scope { COLIBRI_SCOPE_SEQUENCE = 0, COLIBRI_SCOPE_BATCH = 1 };

typedef struct colibri_damping {
  int32_t kind, scope;     /* enums above; REUSE only with scope BATCH */
  int32_t threshold;       /* HEAT, SEQUENCE: uses that cost nothing, 0..1000000 */
  float growth;            /* HEAT: factor by which an expert's price grows, 1..1000; SEQUENCE: with 1 / (1 - decay) uses beyond that; BATCH: with each even
                            * share of the step's tokens in its queue */
  float decay;             /* SEQUENCE: factor of what uses count with each token that does without the expert (CAPACITY: with each token), 0..1 */
  float capacity_factor;   /* CAPACITY: most uses an expert gets, in even shares, 1..1000000; BATCH: of the step's tokens, SEQUENCE: of its recent ones */
  float margin;            /* 0..1000000 */
  float max_rerouted;      /* 0..1: share of (token, layer) pairs that may be changed; SEQUENCE: along the sequence, BATCH: in a step */
} colibri_damping;

/* Damping by itself, from a fresh state: scores [n, experts], n the sum of steps[n_steps], are tokens of one sequence (SEQUENCE: how they are cut into steps
 * changes nothing) or of sequences of their own (BATCH: step by step). `logits`: 1 if the scores are logits, 0 if they are what weights are made of. pinned [n],
 * NULL for none: 1 for tokens of sequences without damping, BATCH only. ids [n, k] by descending score, ties to the lower index; changed [n]: 1 where they are
 * not the k best. A token with a NaN or infinite score keeps 0..k-1. For tests and simulations: it allocates. COLIBRI_EINVAL, COLIBRI_ENOMEM. Any thread. */
COLIBRI_API int colibri_damp_scores(const colibri_damping *damping, const float *scores, int experts, int k, int logits, const int32_t *steps, int n_steps,
                                    const uint8_t *pinned, int32_t *ids, uint8_t *changed, colibri_error *err);

typedef struct colibri_batch {
  int32_t n_seqs, n_dampings;
  const colibri_seq *seqs;      /* [n_seqs] */
  const int32_t *tokens;        /* [sum n_rows] */
  const int32_t *blocks;        /* [sum n_blocks] KV block ids, block i of a sequence holds positions 16i..16i+15 */
  const int32_t *history;       /* [sum n_history]; may be NULL if that is 0 */
  const int32_t *targets;       /* [sum n_logits] token whose log-probability is wanted, -1 for none; NULL for none at all */
  const colibri_damping *dampings; /* [n_dampings]; NULL if that is 0 */
  int32_t *rerouted;            /* out, [n_seqs]: (token, layer) pairs whose experts damping changed; may be NULL */
} colibri_batch;

/* What a row with logits gave, in batch order. Log-probabilities are of the model's own distribution (natural log, temperature 1, no
 * penalty). */
typedef struct colibri_row_result {
  int32_t status;          /* COLIBRI_OK, or COLIBRI_ENUMERIC if this row met a NaN or infinity */
  int32_t error_layer;     /* layer of that, -1 none; == layers: in the head */
  int32_t token;           /* sampled */
  int32_t n_top;
  float logprob;           /* of token */
  float target_logprob;    /* of the target; 0 if none was asked for */
  int32_t target_rank;     /* tokens more likely than the target; -1 if none was asked for */
  int32_t reserved;
  int32_t top_tokens[COLIBRI_MAX_TOP_LOGPROBS];
  float top_logprobs[COLIBRI_MAX_TOP_LOGPROBS];
} colibri_row_result;

/* What a step is made of, in the order of a layer; then the head. */
enum colibri_operation {
  COLIBRI_OP_PREPARE_ATTENTION = 0, /* norm, quantise (first layer: embed) */
  COLIBRI_OP_QKV = 1,
  COLIBRI_OP_STORE_KV = 2,          /* only where COLIBRI_OP_ATTEND does not do it */
  COLIBRI_OP_ATTEND = 3,
  COLIBRI_OP_PREPARE_O = 4,
  COLIBRI_OP_O = 5,                 /* product and residual */
  COLIBRI_OP_PREPARE_MOE = 6,       /* norm, gate, quantise */
  COLIBRI_OP_ROUTE = 7,             /* choice of experts, mini-batches: the stepping thread's own */
  COLIBRI_OP_GATE_UP = 8,           /* with SiLU and quantising */
  COLIBRI_OP_DOWN = 9,              /* product, weighted sum and residual; split_down: product only */
  COLIBRI_OP_COMBINE = 10,          /* split_down: weighted sum and residual */
  COLIBRI_OP_PREPARE_HEAD = 11,
  COLIBRI_OP_HEAD = 12,
  COLIBRI_OP_SAMPLE = 13
};
/* "prepare_attention", "qkv", ...; NULL if operation is none. Any thread. */
COLIBRI_API const char *colibri_operation_name(int operation);

typedef struct colibri_step_stats {
  uint64_t step_ns;        /* the whole step */
  uint64_t wait_ns;        /* the stepping thread waited with nothing to compute */
  uint64_t serial_ns;      /* the stepping thread worked between phases (routing, dispatch, small preparations) */
  uint32_t phases, tasks;
  uint32_t tasks_rerun;    /* tasks taken over from a dead lane */
  uint32_t lanes;          /* lanes of this step, the front end's included */
  uint32_t lanes_lost;     /* lanes found dead in this step */
  uint32_t tasks_homed;    /* tasks that have a home node */
  uint32_t tasks_local;    /* those of them done by a lane of that node */
  uint32_t remote_layers;  /* layers that were handed out */
  uint64_t remote_ns;      /* between handing a layer out and going on with it, what was computed here meanwhile left out */
  uint64_t op_ns[COLIBRI_OPS]; /* by enum colibri_operation: from the end of the operation before to this one's, on the stepping thread's clock; their sum
                                * is step_ns less remote_ns, taking the batch in and giving the results out */
} colibri_step_stats;

/* Runs all layers for one batch. Blocks; call it with no lock the workers' supervision needs. results [sum n_logits] is the caller's.
 * A step is a transaction: on an error nothing may be used but the KV blocks of earlier positions. A dead lane is not an error unless it
 * was the last (COLIBRI_ENOLANES). A row that met a NaN is reported in its result (or for a sequence without logits in seq_status) and
 * disturbs no other. seq_status [n_seqs] may be NULL; gets COLIBRI_OK or COLIBRI_ENUMERIC. stats may be NULL. */
COLIBRI_API int colibri_step(colibri_session *session, const colibri_batch *batch, colibri_row_result *results, int32_t *seq_status,
                             colibri_step_stats *stats, colibri_error *err);
/* Has 1 written to an eventfd, once, in the next call of colibri_step: when other lanes have something long to go on with, should whoever
 * wakes up take the stepping thread's CPU: the first layer's experts, or with many rows anything; or when the call returns, if it comes to none. fd -1: to none. The descriptor stays the
 * caller's; if it does not block, nor does this. Between steps, on the stepping thread. */
COLIBRI_API void colibri_session_tell(colibri_session *session, int fd);
/* ---------------------------------------------------------------- experts and layers that are computed elsewhere
 *
 * A step routes a layer here. If some of the chosen experts are remote, colibri_step returns COLIBRI_NEEDS_REMOTE: the caller packs their mini-batches
 * (colibri_remote_pack), sends them away, lets the experts that are computed here be done meanwhile (colibri_step_local, optional), puts the outputs
 * (colibri_remote_put) or has them computed here after all (colibri_remote_compute), and goes on (colibri_step_resume), which may return
 * COLIBRI_NEEDS_REMOTE again. The batch must stay valid until the step has ended. The outputs are not weighted and are added here, in ascending order of the
 * experts, so that the bits are those of a step without remote experts. All of this on the session's one thread.
 *
 * Whole layers can be elsewhere too, attention and KV cache included. Before such a range the step stands likewise: the caller has colibri_remote_x, the
 * residual stream, computed by whoever has the layers (colibri_layers_run), overwrites it and goes on. */

/* Says which experts are computed elsewhere: remote [layers, experts], 1 for those; NULL: none. Between steps. COLIBRI_ESTATE without split_down. */
COLIBRI_API int colibri_session_remote(colibri_session *session, const uint8_t *remote, colibri_error *err);

/* Says which layers are computed elsewhere: n ranges [first, end), ascending and apart. Between steps. Batches with damping, or that want margins, are refused
 * while there are any, and colibri_session_routes is: the routes of those layers are not known here. COLIBRI_EINVAL, COLIBRI_ESTATE. */
COLIBRI_API int colibri_session_remote_layers(colibri_session *session, const int32_t (*ranges)[2], int32_t n, colibri_error *err);

enum colibri_remote_kind { COLIBRI_REMOTE_EXPERTS = 0, COLIBRI_REMOTE_LAYERS = 1 };

typedef struct colibri_remote {
  int32_t kind;                  /* enum colibri_remote_kind; LAYERS: no experts are named */
  int32_t layer, end;            /* where the step stands; LAYERS: before that layer, and goes on with `end` */
  int32_t n_rows;                /* of the step */
  int32_t n_experts;
  int32_t weighs_input;          /* 1: pairs' weights multiply what experts read, so they must travel along */
  const int32_t *experts, *rows; /* [n_experts] remote experts that have rows, ascending, and how many each; valid until the step goes on */
} colibri_remote;

/* What a step wants. COLIBRI_ESTATE if none waits. */
COLIBRI_API int colibri_remote_state(const colibri_session *session, colibri_remote *out);
/* Bytes of a prepared row of a layer: what its experts read (docs/container.md). 0 if there is no such layer. Any thread. */
COLIBRI_API int64_t colibri_prepared_bytes(const colibri_session *session, int32_t layer);
/* The mini-batches of n experts: their distinct prepared rows, ascending, into rows, *n_rows of them (at most the step's, at most one a pair), and for each pair, expert
 * by expert, the index of its row. weights: the pairs' weights, for models that apply them to what an expert reads; NULL: not wanted.
 * COLIBRI_ESTATE; COLIBRI_EINVAL for an expert that is not wanted. */
COLIBRI_API int colibri_remote_pack(colibri_session *session, const int32_t *experts, int32_t n, void *rows, int32_t *row_of_pair, float *weights,
                                    int32_t *n_rows, colibri_error *err);
/* Takes the outputs of n experts: out f32 [pairs, hidden], at any address, pairs as colibri_remote_pack numbers them, `bytes` in all. A pair whose output begins
 * with NaN makes its row bad. COLIBRI_ESTATE, COLIBRI_EINVAL. */
COLIBRI_API int colibri_remote_put(colibri_session *session, const int32_t *experts, int32_t n, const void *out, uint64_t bytes, colibri_error *err);
/* Computes n experts here after all. COLIBRI_ESTATE, COLIBRI_EINVAL. */
COLIBRI_API int colibri_remote_compute(colibri_session *session, const int32_t *experts, int32_t n, colibri_error *err);
/* The residual stream of a step that stands before layers computed elsewhere: f32 [n_rows, hidden], row stride *stride, to be overwritten before
 * colibri_step_resume; a row that begins with NaN is bad. NULL if none stands so. */
COLIBRI_API float *colibri_remote_x(colibri_session *session, int64_t *stride);
/* Computes the layer's experts that are not remote. COLIBRI_ESTATE if that has been done. */
COLIBRI_API int colibri_step_local(colibri_session *session, colibri_error *err);
/* Goes on; results, seq_status and stats as for colibri_step. COLIBRI_ESTATE while outputs are missing: the step waits still. */
COLIBRI_API int colibri_step_resume(colibri_session *session, colibri_row_result *results, int32_t *seq_status, colibri_step_stats *stats, colibri_error *err);
/* Ends a step that waits, as if it had failed: routing states in slots are what they were before it, and nothing of it is counted. The batch must still
 * be there. Does nothing if none waits. */
COLIBRI_API void colibri_step_abandon(colibri_session *session);

enum colibri_rows_kind { COLIBRI_ROWS_PREPARED = 0, COLIBRI_ROWS_F32 = 1, COLIBRI_ROWS_BF16 = 2 };

/* Mini-batches of one layer, for another's step. */
typedef struct colibri_expert_work {
  int32_t layer, kind;           /* enum colibri_rows_kind */
  int32_t n_experts, n_rows;     /* n_rows at most the session's max_rows, pairs at most max_rows * top_k */
  const int32_t *experts, *counts; /* [n_experts] ascending; pairs of each */
  const void *rows;              /* [n_rows] prepared, or [n_rows, hidden]: what the experts read, so already normed; at any address */
  uint64_t rows_bytes;
  const int32_t *row_of_pair;    /* [sum counts] */
  const float *weights;          /* [sum counts], for models that apply them to what an expert reads; NULL: 1 */
} colibri_expert_work;

/* Runs experts by themselves, on the session's lanes: out [sum counts, hidden], not weighted. Pairs of a row with a NaN or infinity are all NaN.
 * COLIBRI_ESTATE without split_down or while a step waits; COLIBRI_EINVAL, COLIBRI_ENOLANES. */
COLIBRI_API int colibri_experts_run(colibri_session *session, const colibri_expert_work *work, float *out, colibri_error *err);
/* Routes rows [n, hidden], normed, by a layer's router: ids, weights [n, top_k] by descending gate score; bad [n]: 1 for a row with a NaN or infinity, whose
 * ids are 0.. and whose weights are 0. n at most max_rows. The session's one thread, between steps.
 * COLIBRI_EINVAL; COLIBRI_EUNSUPPORTED where the router reads the residual. */
COLIBRI_API int colibri_route_rows(colibri_session *session, int32_t layer, const float *x, int32_t n, int32_t *ids, float *weights, uint8_t *bad,
                                   colibri_error *err);
/* A layer's whole block of experts, router included, for n rows, any number: x [n, hidden], normed, becomes what the block returns, without the residual, all
 * NaN for a row that met a NaN or infinity. ids, weights [n, top_k] as of colibri_route_rows, each NULL if not wanted. Not in the telemetry; the routes of the last
 * step are gone. Between steps; what colibri_session_remote says does not matter. COLIBRI_EINVAL, COLIBRI_ESTATE, COLIBRI_EUNSUPPORTED, COLIBRI_ENOLANES. */
COLIBRI_API int colibri_moe_run(colibri_session *session, int32_t layer, float *x, int32_t n, int32_t *ids, float *weights, colibri_error *err);
/* Runs layers [first, end) for a batch, with the session's own KV blocks: x [rows, hidden], the residual stream before them, becomes that behind them, all NaN for a
 * row that met a NaN or infinity. Of the batch only rows, positions and blocks matter: tokens must be in the vocabulary, logits and damping are not looked at. What is
 * said of transactions and of seq_status at colibri_step holds; remote experts and layers of this session do not matter. Between steps. */
COLIBRI_API int colibri_layers_run(colibri_session *session, const colibri_batch *batch, int32_t first, int32_t end, float *x, int32_t *seq_status,
                                   colibri_error *err);

/* Logits of the last step, [sum n_logits, vocab] f32, row stride `vocab`; valid until the next step. */
COLIBRI_API const float *colibri_session_logits(const colibri_session *session);
/* Copies the last step's routes (trace_routes): experts and weights [router_layers, rows, top_k], a row's experts by descending undamped score, ties to the
 * lower index; margins [router_layers, rows], the undamped selection score of the top_k-th expert less the next one's: INFINITY if all are chosen, NaN if the row
 * has one or its sequence wanted none. `count`: entries experts has room for. Each of the three may be NULL. COLIBRI_ESTATE if the session keeps none. */
COLIBRI_API int colibri_session_routes(const colibri_session *session, int32_t *experts, float *weights, float *margins, int64_t count,
                                       colibri_error *err);
/* Token counts per layer and expert since the session was opened: counts [layers, experts]. Any thread. */
COLIBRI_API int colibri_session_expert_counts(const colibri_session *session, uint64_t *counts, int64_t count, colibri_error *err);

/* ---------------------------------------------------------------- routing telemetry */

#define COLIBRI_RUN_BUCKETS 8

/* Counts since the session was opened, taken where the rows of a layer are dealt out to experts, so after damping. A queue is the tokens an expert gets in one
 * step. Each array may be NULL: not wanted. */
typedef struct colibri_telemetry {
  int32_t layers, experts;   /* what the arrays have room for: the model's, or it is refused */
  uint64_t *tokens;          /* [layers, experts] */
  uint64_t *active;          /* [layers, experts] steps in which the expert had a token */
  uint64_t *steps, *rows;    /* [layers] */
  uint64_t *row_squares;     /* [layers] sum over steps of the rows' number squared: tells what queues owe to steps of different size */
  uint64_t *queue_squares;   /* [layers] sum over steps and experts of the queue's length squared */
  uint64_t *queue_longest;   /* [layers] sum over steps of the longest queue's length */
  uint64_t *longest_squares; /* [layers] sum over steps of that squared */
  uint64_t *queue_max;       /* [layers] the longest queue of all */
  uint64_t *active_experts;  /* [layers] sum over steps of experts that had a token */
  uint64_t *rerouted;        /* [layers] rows whose experts damping changed */
  uint64_t *repeats;         /* [layers] rows of sequences with a slot whose first expert is that of the token before */
  uint64_t *runs;            /* [layers, COLIBRI_RUN_BUCKETS] ended runs of one first expert in a sequence with a slot: bucket b counts lengths 2^b to
                              * 2^(b+1) - 1, the last all above. A run ends with another first expert, or with its slot made anew */
} colibri_telemetry;

/* Copies the counts. Any thread, also while a step runs: each count is whole, a layer's belong to the same step or to two in a row. COLIBRI_EINVAL. */
COLIBRI_API int colibri_session_telemetry(const colibri_session *session, const colibri_telemetry *into, colibri_error *err);

/* ---------------------------------------------------------------- worker: a lane's side */

typedef struct colibri_worker colibri_worker;

/* Maps the team and arena of a session (descriptors are duplicated). Selects the session's instruction set. Fails with COLIBRI_EFORMAT if the
 * segments belong to another version, another model or are damaged. */
COLIBRI_API int colibri_worker_attach(const colibri_model *model, int team_fd, int arena_fd, colibri_worker **out, colibri_error *err);
/* Runs one lane on the calling thread until it is asked to leave: claims tasks, computes, marks them done. cpu >= 0 pins the thread to
 * that CPU first (a refusal is reported, COLIBRI_EIO). Several threads may run different lanes of one worker. */
COLIBRI_API int colibri_worker_run(colibri_worker *worker, int lane, int cpu, colibri_error *err);
COLIBRI_API void colibri_worker_detach(colibri_worker *worker);

/* ---------------------------------------------------------------- starting workers' processes */

/* What a process is to be: argv[0] is the program's path, argv ends with NULL, the environment is this process's. `input` and `output` become its
 * descriptors 0 and 1, 2; keep [n_keep] stay open under their numbers (3 or more), all others are closed. It leads a process group of its own in this
 * session; its folder is "/". */
typedef struct colibri_spawn_wish {
  char *const *argv;
  int32_t input, output;
  const int32_t *keep;
  int32_t n_keep, reserved;
} colibri_spawn_wish;

/* Makes it and returns at once, whatever becomes of it: a process that is stopped before its program runs holds nobody up. One that cannot run its
 * program says so on `output` and exits with 127. *pid is the caller's child, to be reaped; *pidfd the caller's, close-on-exec.
 * COLIBRI_EINVAL, COLIBRI_EIO. Any thread; a child that asks for a signal with its parent's death gets it with this thread's. */
COLIBRI_API int colibri_spawn(const colibri_spawn_wish *wish, int *pid, int *pidfd, colibri_error *err);

/* ---------------------------------------------------------------- copying a model into memory */

/* Copies the bytes from begin to end of a file to base + begin and so on; base, at a multiple of 2 MiB, is a shared writable mapping of memory, empty there,
 * in which byte 0 of the file would lie. Whole huge pages in between are made such (MADV_COLLAPSE) while they are empty; *unhuge becomes 0, or the errno
 * with which the kernel refused, and all is copied the same. COLIBRI_EIO: the file could not be read or has ended; COLIBRI_EINVAL. Any thread. */
COLIBRI_API int colibri_fill(int file, void *base, uint64_t begin, uint64_t end, int *unhuge, colibri_error *err);

/* ---------------------------------------------------------------- probes: what the machine can do at most */

#define COLIBRI_PROBE_ALIGN 512

/* One measurement on the calling thread, with the selected instruction set. Times are CLOCK_MONOTONIC's; several threads' probes together take
 * from the first begin to the last end. */
typedef struct colibri_probe {
  uint64_t begin_ns, end_ns;
  uint64_t work;           /* bytes, operations or tokens, as each probe says */
} colibri_probe;

/* Writes `bytes` bytes, both multiples of COLIBRI_PROBE_ALIGN: touches pages and measures writing. work: bytes. COLIBRI_EINVAL. Any thread. */
COLIBRI_API int colibri_probe_fill(void *data, uint64_t bytes, colibri_probe *out, colibri_error *err);
/* Reads every byte `passes` times, in order, with the widest plain loads; same bounds. work: bytes read. COLIBRI_EINVAL. Any thread. */
COLIBRI_API int colibri_probe_read(const void *data, uint64_t bytes, int passes, colibri_probe *out, colibri_error *err);
/* Multiplies and adds in registers for `duration_ns` or a little longer, with the instructions a matrix of `format` (enum colibri_format) is
 * multiplied with: no memory is touched. work: operations, a multiplication and an addition being two. COLIBRI_EINVAL. Any thread. */
COLIBRI_API int colibri_probe_compute(int format, uint64_t duration_ns, colibri_probe *out, colibri_error *err);

/* What colibri_probe_route runs: `calls` times the routing of `tokens` tokens. */
typedef struct colibri_route_probe {
  int32_t experts, top_k, tokens;
  int32_t hidden;          /* width of the gate's product, which is then part of each call; 0: gate logits are given */
  int32_t calls;
} colibri_route_probe;

/* Chooses experts and weights of made-up tokens. work: tokens routed. COLIBRI_EINVAL, COLIBRI_ENOMEM. Any thread. */
COLIBRI_API int colibri_probe_route(const colibri_route_probe *wish, colibri_probe *out, colibri_error *err);

#ifdef __cplusplus
}
#endif
#endif
