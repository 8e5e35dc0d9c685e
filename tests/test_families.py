"""The table of families."""

from support import tiny_random_model

from weaver_hf import WeaverConfig, WeaverModel
from weaver_hf.target.families import FAMILIES, family_of


def test_the_parts_of_a_model_are_found_before_and_after_the_swap():
    model = tiny_random_model()
    family = family_of(model)
    mixers = family.mixers_of(model)
    assert [m.layer_idx for m in mixers] == [0, 1, 2]
    assert family.decoder_of(model) is model.model
    WeaverModel(WeaverConfig()).attach(model)
    assert family_of(model) is family
    assert family.mixers_of(model) == mixers


def test_every_family_names_classes_of_its_model_type():
    import importlib

    for model_type, family in FAMILIES.items():
        package = model_type.removesuffix("_text")
        module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
        assert hasattr(module, family.model_class)
        assert hasattr(module, family.mixer_class)
