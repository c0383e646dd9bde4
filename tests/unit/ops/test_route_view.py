"""What `colibri route` shows of an answer."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from colibri.v1 import experts_pb2 as pb
from ops.commands.common import CommandError
from ops.route_view import MOST_COLUMNS, RouteTable, as_json, draw, tables

TEXTS = [b" the", b"\n", b"\xff", b""]


def answer(layers: int = 2, *, margin: float = 0.5) -> pb.RouteResponse:
    """Layer L sends every token to experts 3 and L % 3."""
    experts = np.array([[[3, layer % 3]] * len(TEXTS) for layer in range(layers)], "<i4")
    weights = np.full(experts.shape, 0.1, "<f4")
    weights[..., 0] = 0.9
    margins = np.full(experts.shape[:2], margin, "<f4")
    return pb.RouteResponse(
        model="m[odel]",
        token_ids=range(len(TEXTS)),
        token_bytes=TEXTS,
        layers=range(10, 10 + layers),
        experts_per_layer=4,
        experts=pb.Tensor(dtype=pb.DATA_TYPE_I32, shape=experts.shape, data=experts.tobytes()),
        weights=pb.Tensor(dtype=pb.DATA_TYPE_F32, shape=weights.shape, data=weights.tobytes()),
        margins=pb.Tensor(dtype=pb.DATA_TYPE_F32, shape=margins.shape, data=margins.tobytes()),
    )


def shown(message: pb.RouteResponse) -> str:
    out = io.StringIO()
    console = Console(file=out, width=160, highlight=False)
    for part in tables(RouteTable.of(message)):
        console.print(part)
    return out.getvalue()


def test_tables_have_a_line_a_layer_and_a_line_a_token() -> None:
    lines = shown(answer()).splitlines()
    assert lines[0] == "m[odel]: 4 tokens, 4 experts a layer, 2 a token"
    assert lines[2].split() == ["10", "2", "0", "(4)", "2.00", "100%", "0.50", "█", "█"]
    assert sum("3 0.90, 0 0.10  0.50" in line and "3 0.90, 1 0.10  0.50" in line for line in lines) == 4
    assert [line.split("  ")[0].strip() for line in lines[-4:]] == ["' the'", r"'\n'", "'\N{REPLACEMENT CHARACTER}'", "#3"]
    assert "damping" not in shown(answer())


def test_rerouting_is_told_of_a_damped_answer() -> None:
    damped = answer()
    damped.rerouted, damped.routed = 2, 8
    assert "2 of 8 pairs of a token and a layer (25.00%)" in shown(damped)


def test_tokens_of_many_layers_are_listed_on_demand_only() -> None:
    assert "--layer" in shown(answer(MOST_COLUMNS + 1))
    assert "--layer" not in shown(answer(MOST_COLUMNS))


def test_json_has_exact_numbers_and_none_that_json_does_not_know() -> None:
    told = json.loads(json.dumps(as_json(RouteTable.of(answer(margin=float("inf")))), allow_nan=False))
    assert told["tokens"][0] == {"id": 0, "text": " the"}
    assert told["layers"][1]["layer"] == 11
    assert told["layers"][1]["experts"][0] == [3, 1]
    assert told["layers"][1]["weights"][0] == [0.9, 0.1]
    assert told["layers"][1]["margins"] == [None] * 4


def test_numbers_of_an_unknown_type_are_an_error() -> None:
    strange = answer()
    strange.weights.dtype = 99  # type: ignore[assignment]
    with pytest.raises(CommandError, match="type 99"):
        RouteTable.of(strange)


@pytest.mark.parametrize("layers", [1, 3, 12])
def test_a_picture_is_drawn(tmp_path: Path, layers: int) -> None:
    draw(RouteTable.of(answer(layers)), tmp_path / "heat.png")
    assert (tmp_path / "heat.png").read_bytes().startswith(b"\x89PNG")
    draw(RouteTable.of(answer(layers)), tmp_path / "heat.svg")
    assert "layer 10" in (tmp_path / "heat.svg").read_text()


def test_a_name_that_is_no_pictures_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="\\.png"):
        draw(RouteTable.of(answer()), tmp_path / "heat.gif2")
