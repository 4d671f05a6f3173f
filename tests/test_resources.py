"""Named configurations and shipped model folders are found wherever the package lies."""

import shutil

import pytest

from deepinfer_jax import resources


def test_both_forms_of_a_configuration_are_found():
    assert {"deepseek-v4.1-flash", "tiny-s"} <= set(resources.config_names())
    assert resources.config_file("tiny-s").name == "tiny-s.json"
    assert resources.config_file("deepseek-v4.1-flash").name == "config.json"


@pytest.mark.parametrize("lookup", [resources.config_file, resources.model_folder])
@pytest.mark.parametrize("name", ["nothing-of-this-name", "../configs/tiny-s", ""])
def test_an_unknown_name_is_refused_with_the_known_ones(lookup, name):
    with pytest.raises(ValueError, match=r"unknown .*; (known|shipped): \w+"):
        lookup(name)


def test_package_data_goes_before_the_checkout(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "deepinfer_jax"
    shutil.copytree(resources.config_folder(), package / "configs")
    monkeypatch.setattr(resources, "PACKAGE", package)
    assert resources.config_file("tiny-s") == package / "configs" / "tiny-s.json"
    assert resources.model_names() == ()


def test_a_damaged_installation_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(resources, "PACKAGE", tmp_path / "deepinfer_jax")
    with pytest.raises(FileNotFoundError, match="reinstall"):
        resources.config_names()


def test_a_shipped_model_is_a_folder_with_its_configuration(tmp_path, monkeypatch):
    folder = tmp_path / "assets" / "some-model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr(resources, "PACKAGE", tmp_path)
    assert resources.model_names() == ("some-model",)
    assert resources.model_folder("some-model") == folder
