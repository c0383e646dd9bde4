"""Chat templates: rendering, refusals, and the sandbox."""

from __future__ import annotations

import pytest

from service.chat import ChatError, ChatTemplate

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_messages_render_in_order_with_and_without_the_assistants_header() -> None:
    template = ChatTemplate(CHATML)
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi {{ x }}"}]
    prompt = template.render(turns)
    assert prompt == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi {{ x }}<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(turns, add_generation_prompt=False) == prompt.removesuffix("<|im_start|>assistant\n")


def test_special_tokens_dates_json_and_loop_controls_are_there() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
        "{{ eos_token }}{{ strftime_now('%Y') | length }}"
    )
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    rendered = template.render([{"role": "user", "content": "<é>"}, {"role": "user", "content": "no"}])
    assert rendered == '<s>{"role": "user", "content": "<é>"}</s>4'


def test_a_refusal_carries_the_templates_own_words() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ChatError, match="roles must alternate"):
        template.render([])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ 1 // 0 }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox_or_crash_the_server(source: str) -> None:
    with pytest.raises(ChatError, match="failed"):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])


def test_a_template_that_does_not_compile_is_refused() -> None:
    with pytest.raises(ChatError, match="compiled"):
        ChatTemplate("{% if %}")
