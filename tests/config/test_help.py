from nvfp4_train.config.build import known_keys, plain_values
from nvfp4_train.config.help import KEYS, describe, help_text
from nvfp4_train.config.load import load_config
from nvfp4_train.config.tree import config_dir, group_choices
from tests.support.configs import composed


def test_every_group_and_choice_is_listed_with_its_comment():
    lines = help_text().splitlines()
    for group, choices in group_choices().items():
        assert f"  {group}" in lines
        for choice in choices:
            comment = describe(config_dir() / group / f"{choice}.yaml")
            assert comment, f"configs/{group}/{choice}.yaml needs a comment at its top"
            assert any(
                line.split()[0].lstrip("*") == choice and line.endswith(comment) for line in lines if line.strip()
            )


def test_defaults_are_marked():
    assert "*nvfp4 " in help_text()
    assert "*bf16 " not in help_text()


def test_the_keys_exist():
    assert set(KEYS) <= set(known_keys(plain_values(composed())))


def test_the_examples_compose():
    examples = [
        line.split()[2:] for line in help_text().splitlines() if line.startswith("  python scripts/pretrain.py ")
    ]
    assert len(examples) >= 5
    for words in examples:
        load_config([word.replace("'", "") for word in words if word not in ("--cfg", "job")])


def test_lines_fit_a_wide_terminal():
    assert max(map(len, help_text().splitlines())) <= 120


def test_a_package_line_is_no_description(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("# @package _global_\n# What it is.\na: 1 # not this\n", encoding="utf-8")
    assert describe(path) == "What it is"
    path.write_text("a: 1\n", encoding="utf-8")
    assert describe(path) == ""
