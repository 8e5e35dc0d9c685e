"""WeaverConfig and TreeConfig: defaults, round trips, unknown settings."""

from dataclasses import asdict

import pytest
from support import drafter_config
from transformers import AutoConfig

from weaver_hf import TreeConfig, WeaverConfig
from weaver_hf.configuration_weaver import AdapterConfig
from weaver_hf.errors import TreeConfigError


def test_the_default_budget_depends_on_the_device():
    assert TreeConfig().nodes_on("cpu") == 15
    assert TreeConfig().nodes_on("cuda") == 63
    assert TreeConfig(budget=7).nodes_on("cuda") == 7


def test_a_config_round_trips_through_json(tmp_path):
    config = WeaverConfig(
        vocab_size=99,
        hidden_size=8,
        target_layer_ids=[1, 3],
        tree_config=TreeConfig(budget=31),
        base_model_name_or_path="org/target",
        eos_token_id=5,
    )
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is WeaverConfig
    for name in (
        "vocab_size",
        "hidden_size",
        "target_layer_ids",
        "tree_config",
        "base_model_name_or_path",
        "eos_token_id",
    ):
        assert getattr(loaded, name) == getattr(config, name)
    assert loaded.tree_config == asdict(TreeConfig(budget=31))


@pytest.mark.parametrize("way", [dict, lambda fields: AdapterConfig(**fields)], ids=["dict", "dataclass"])
def test_an_adapter_round_trips_and_brings_its_builder(tmp_path, way):
    adapter = {"generation": "rope", "rank": 24, "num_heads": 3, "mlp_dim": 20, "max_depth": 7, "pool_size": 40}
    config = drafter_config(adapter=way(adapter), tree_config={})
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert AdapterConfig.from_dict(loaded.adapter) == AdapterConfig(**adapter)
    assert loaded.tree_config["builder"] == "weaver"
    assert drafter_config(adapter=way(adapter)).tree_config["builder"] == "marginal", "said by the config itself"


@pytest.mark.parametrize("name", ["rounds", "parents", "children", "pool"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "3"])
def test_a_tree_setting_that_is_no_count_is_refused_by_name(name, value):
    with pytest.raises(TreeConfigError, match=f"{name} {value!r}"):
        TreeConfig(**{name: value})


@pytest.mark.parametrize("tree_config", [{"bugdet": 3}, {"budget": -1}])
def test_a_config_with_a_wrong_tree_setting_is_refused(tree_config):
    with pytest.raises(TreeConfigError):
        WeaverConfig(tree_config=tree_config)
