"""The shipped container of `tiny`: these bytes, this quality, these words, experts that have specialised by kind of text."""

from __future__ import annotations

import hashlib

import pytest
from tokenizers import Tokenizer

from ops.container import Container
from ops.logits import compute_logits
from ops.models import TINY_FILE
from ops.tiny.evaluate import EXPERTS, TEXTS, read_texts, trace_container
from ops.tiny.figures import MIXED, Figures, all_figures
from ops.tiny.schedule import BOS_ID
from ops.tiny.splits import KINDS

SHA256 = "dd093407b16d255ff5057afed935a46ae782ec5968ac8be041c5023e066fa348"
LIMIT = 12_000_000  # bytes, so that a wheel stays small
PERPLEXITY = {"bible": 38.079, "shakespeare": 59.253, "python": 69.852}  # of the checkpoint in torch, f32
CHARACTERS = 20_000
SPECIALISED = 1.5  # load max/mean within a kind, of some layer
GREEDY = {
    "And it came to pass": ", that the LORD had done to the LORD.\n\n[Exit.]\n\nSCENE II. Amen. Amen. A room in the land,",
    "ORSINO.\n": "Soft, Iago, and Iago, and I'll\nhave you to the king's house.\n\n[Enter CAR",
    "    def __init__(self": ", self, self, self, self, self, self, self, self, self, self, self, self.stream, self.stack",
}


@pytest.fixture(scope="module")
def found() -> dict[str, Figures]:
    """On the beginnings of the shipped texts, with the engine."""
    texts = {kind: text[:CHARACTERS] for kind, text in read_texts(TEXTS).items()}
    return all_figures(trace_container(TINY_FILE, texts), experts=EXPERTS)


def test_the_file_is_the_one_the_figures_are_of() -> None:
    data = TINY_FILE.read_bytes()
    assert len(data) < LIMIT
    assert hashlib.sha256(data).hexdigest() == SHA256


def test_it_says_where_it_comes_from_and_under_which_licences() -> None:
    with Container.open(TINY_FILE) as container:
        provenance = container.descriptor["provenance"]
        licence = container.blob("licence").decode()
    assert isinstance(provenance, dict)
    assert provenance["licence"] == "apache-2.0"
    for text in ("King James Bible (public domain)", "CC-BY-2.5", "PSF-2.0"):
        assert text in str(provenance["source"])
    assert licence == (TINY_FILE.parent / "LICENCES.txt").read_text(encoding="utf-8")


def test_perplexity_on_unseen_texts_is_that_of_the_checkpoint(found: dict[str, Figures]) -> None:
    for kind in KINDS:
        assert found[kind].perplexity == pytest.approx(PERPLEXITY[kind], rel=0.005)  # int8 costs at most half a per cent


def test_experts_have_specialised_by_kind_of_text(found: dict[str, Figures]) -> None:
    for kind in KINDS:
        assert max(found[kind].load) > SPECIALISED
    hottest = [max(found[kind].load) for kind in KINDS]
    assert max(found[MIXED].load) < min(hottest)  # other experts are hot in other kinds


@pytest.mark.parametrize("prompt", GREEDY, ids=KINDS)
def test_greedy_words(prompt: str) -> None:
    """int8 gives the same bits on every instruction set, so these are the words everywhere."""
    with Container.open(TINY_FILE) as container:
        tokenizer = Tokenizer.from_str(container.blob("tokenizer.json").decode())
    ids = tokenizer.encode(prompt).ids
    assert ids[0] == BOS_ID
    result = compute_logits(TINY_FILE, tokens=ids, greedy=32)
    assert tokenizer.decode(result.greedy.tolist(), skip_special_tokens=False) == GREEDY[prompt]
