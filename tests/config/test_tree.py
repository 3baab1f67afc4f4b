from dataclasses import fields

import nvfp4_train
from nvfp4_train.config.train import TrainConfig
from nvfp4_train.config.tree import config_dir, group_choices


def test_every_group_but_the_experiments_is_a_field_of_the_root():
    names = {field.name for field in fields(TrainConfig)}
    assert set(group_choices()) - {"experiment"} <= names


def test_choices_are_the_files(tmp_path, monkeypatch):
    package = tmp_path / "nvfp4_train"
    for folder in ("configs/model/big", "configs/.hidden"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("model/b.yaml", "model/a.yaml", "model/big/c.yaml", "model/notes.txt", ".hidden/d.yaml", "train.yaml"):
        (tmp_path / "configs" / file).touch()
    monkeypatch.setattr(nvfp4_train, "__file__", str(package / "__init__.py"))
    assert group_choices() == {"model": ["a", "b", "big/c"]}


def test_configs_inside_an_installed_package_come_first(tmp_path, monkeypatch):
    package = tmp_path / "nvfp4_train"
    (package / "configs").mkdir(parents=True)
    (tmp_path / "configs").mkdir()
    monkeypatch.setattr(nvfp4_train, "__file__", str(package / "__init__.py"))
    assert config_dir() == package / "configs"
