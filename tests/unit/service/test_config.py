"""Settings: from the environment, overridden, and refused by name."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from engine_c import Damping
from service.config import ConfigError, ServeConfig, cache_dir, parse_bytes, unknown_variables
from service.node.config import NodeConfig


def test_the_environment_is_read_and_keywords_win() -> None:
    environ = {"COLIBRI_MODEL": "/m.colibri", "COLIBRI_PORT": "7", "COLIBRI_KV_MEMORY": "2GiB", "COLIBRI_DRAIN_GRACE": "1.5", "OTHER": "x"}
    config = ServeConfig.from_env(environ, port=8, host=None)
    assert (config.model, config.port, config.kv_memory, config.drain_grace) == (Path("/m.colibri"), 8, 2 << 30, 1.5)
    assert config.host == "127.0.0.1"


def test_every_option_for_nodes_is_in_the_page_that_the_settings_refer_to() -> None:
    page = (Path(__file__).parents[3] / "docs" / "deployment.md").read_text(encoding="utf-8")
    options = ["--" + field.name.replace("_", "-") for field in fields(ServeConfig) if field.name.startswith("nodes_")]
    assert [option for option in options if not re.search(rf"{option}(?![\w-])", page)] == []
    assert len(options) > 10


def test_empty_variables_count_as_unset() -> None:
    assert ServeConfig.from_env({"COLIBRI_PORT": ""}).port == 50051


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"port": 65536}, "port is 65536"),
        ({"max_seqs": 0}, "max_seqs is 0"),
        ({"max_rows": 8, "max_seqs": 16}, "max_rows is 8, less than max_seqs 16"),
        ({"max_logit_rows": 8, "max_seqs": 16}, "max_logit_rows is 8"),
        ({"load": "copy"}, "load is 'copy': it must be one of auto, map, memfd"),
        ({"kv_format": "int8"}, "kv_format is 'int8'"),
        ({"front_lane": "maybe"}, "front_lane is 'maybe'"),
        ({"workers_per_node": 0, "front_lane": "off"}, "nothing would compute"),
        ({"host": ""}, "host is empty"),
        ({"drain_grace": -1.0}, "drain_grace is -1.0"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServeConfig(**wrong)


@pytest.mark.parametrize(("variable", "raw"), [("COLIBRI_PORT", "http"), ("COLIBRI_DRAIN_GRACE", "soon"), ("COLIBRI_KV_MEMORY", "lots")])
def test_a_variable_that_is_no_number_is_named(variable: str, raw: str) -> None:
    with pytest.raises(ConfigError, match=f"{variable} is '{raw}'"):
        ServeConfig.from_env({variable: raw})


def test_damping_is_a_kind_with_numbers_and_a_scope() -> None:
    assert ServeConfig().default_damping is None
    environ = {"COLIBRI_DAMPING": "heat,margin=0.5", "COLIBRI_DAMPING_SCOPE": "batch"}
    assert ServeConfig.from_env(environ).default_damping == Damping("heat", scope="batch", growth=1.15, margin=0.5)
    assert ServeConfig(damping="reuse").default_damping == Damping("reuse", scope="batch", margin=0.5)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"damping": "warm"}, r"damping is 'warm'; it must be one of off, heat"),
        ({"damping": "heat,margin=-1"}, r"damping: margin is -1"),
        ({"damping": "heat", "damping_scope": "world"}, r"damping_scope is 'world'"),
        ({"damping_scope": "batch"}, r"damping is off; it takes no scope"),
    ],
)
def test_wrong_damping_is_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ServeConfig(**wrong)


def test_a_setting_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="no setting prot"):
        ServeConfig.from_env({}, prot=1)


def test_a_changed_copy_is_checked_again() -> None:
    with pytest.raises(ConfigError, match="max_rows"):
        ServeConfig().with_(max_rows=1)


@pytest.mark.parametrize(("text", "size"), [("4096", 4096), ("512M", 512 << 20), ("2GiB", 2 << 30), ("1.5k", 1536), ("64 mb", 64 << 20)])
def test_sizes_have_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("config", "address"),
    [
        (ServeConfig(host="::1", port=5), "[::1]:5"),
        (ServeConfig(host="0.0.0.0", port=5), "0.0.0.0:5"),
        (ServeConfig(unix_socket="/run/c.sock"), "unix:/run/c.sock"),
    ],
)
def test_the_address_is_written_as_grpc_wants_it(config: ServeConfig, address: str) -> None:
    assert config.address == address


def test_the_cache_folder_can_be_chosen() -> None:
    assert cache_dir({"COLIBRI_CACHE": "/c"}) == Path("/c")
    assert cache_dir({"XDG_CACHE_HOME": "/x"}) == Path("/x/colibri")


def test_variables_that_mean_nothing_are_found_with_what_was_meant() -> None:
    environ = {"COLIBRI_KV_MEM": "1", "COLIBRI_KV_MEMORY": "64M", "COLIBRI_WORKERS": "3", "COLIBRI_QQ": "1", "COLIBRI_ISA": "avx2", "A": ""}
    assert unknown_variables(environ) == {
        "COLIBRI_KV_MEM": "COLIBRI_KV_MEMORY",
        "COLIBRI_QQ": "",
        "COLIBRI_WORKERS": "COLIBRI_WORKERS_PER_NODE",
    }


def test_what_kubernetes_sets_is_not_among_them() -> None:
    environ = {
        "COLIBRI_SERVICE_HOST": "10.0.0.1",
        "COLIBRI_SERVICE_PORT_GRPC": "50051",
        "COLIBRI_PORT_50051_TCP_ADDR": "10.0.0.1",
        "COLIBRI_EU_PORT": "tcp://10.0.0.1:50051",
    }
    assert unknown_variables(environ) == {}
    assert unknown_variables({"COLIBRI_METRIC_PORT": "9090"}) == {"COLIBRI_METRIC_PORT": "COLIBRI_METRICS_PORT"}


@pytest.mark.parametrize(
    "wrong",
    [{"operator_address": "0.0.0.0:7", "operator_cert": "c", "operator_key": "k"}, {"operator_address": "h:7"}, {"operator_ca": "a"}],
)
def test_operators_over_tcp_need_all_files_of_mutual_tls(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="operator_"):
        ServeConfig(**wrong)


def test_settings_for_nodes_are_nothing_without_nodes() -> None:
    environ = {"COLIBRI_NODES_BALANCE": "auto"}
    with pytest.raises(ConfigError, match="nodes_balance: only for nodes"):
        ServeConfig.from_env(environ)
    with pytest.raises(ConfigError, match="nodes_timeout_ms: only for nodes"):
        ServeConfig.from_env({}, nodes_timeout_ms=99)
    assert ServeConfig.from_env(environ, nodes="").nodes_balance == "auto"
    assert ServeConfig.from_env(environ, nodes="localhost:1").nodes_balance == "auto"


def test_a_node_told_to_hold_by_two_settings_says_which_and_whence() -> None:
    with pytest.raises(ConfigError, match=r"experts 0-3 and share auto \(from COLIBRI_SHARE\) are given"):
        NodeConfig.from_env({"COLIBRI_SHARE": "auto"}, experts="0-3")
    with pytest.raises(ConfigError, match=r"share 1/2 and layers 0 are given"):
        NodeConfig(share="1/2", layers="0")
    assert NodeConfig.from_env({"COLIBRI_SHARE": "auto"}, experts="0-3", share="").experts == "0-3"
