import pytest

from nvfp4_train.config.hub_data import HubDataConfig
from nvfp4_train.config.load import load_config
from nvfp4_train.config.problem import ConfigError


def test_shipped_choice_names_fineweb_edu():
    cfg = load_config(["data=fineweb_edu"]).cfg
    assert isinstance(cfg.data, HubDataConfig)
    assert (cfg.data.dataset, cfg.data.column, cfg.data.streaming) == ("HuggingFaceFW/fineweb-edu", "text", True)


@pytest.mark.parametrize(
    "override", ["dataset=''", "split=''", "column=''", "max_tokens=-1", "shard_tokens=0", "num_workers=0",
                 "tokenizer_characters=0", "validation_fraction=0"],
)  # fmt: skip
def test_wrong_values_are_named(override):
    with pytest.raises(ConfigError) as caught:
        load_config(["data=fineweb_edu", f"data.{override}"])
    assert [problem.key for problem in caught.value.problems] == [f"data.{override.partition('=')[0]}"]
