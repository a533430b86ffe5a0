"""Names that modules had in the last release."""

import warnings
from importlib import import_module

import pytest

from rlt_lightning import moved
from rlt_lightning.datamodules.loader import StepLoader


@pytest.mark.parametrize("old", [*moved.MOVED, *moved.PACKAGES, "records.rows"])
def test_every_moved_module_leads_to_modules_that_exist(old: str):
    with pytest.warns(FutureWarning, match="has moved to"):
        module = moved.MovedFinder().create_module(moved.ModuleSpec(f"rlt_lightning.{old}", None))
    assert [import_module(f"rlt_lightning.{place}") for place in moved.new_places(old)]
    with pytest.raises(AttributeError, match="which has no 'nonsense'"):
        _ = module.nonsense


def test_an_old_class_path_finds_its_class_and_warns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(moved.MOVED, "old_room.losses", ("numerics.rewards", "numerics.losses"))
    monkeypatch.setitem(moved.MOVED, "old_room", ("numerics",))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = import_module("rlt_lightning.old_room.losses")
    assert losses.GRPOLoss.__module__ == "rlt_lightning.numerics.losses"
    said = "rlt_lightning.old_room.losses has moved to rlt_lightning.numerics.rewards, rlt_lightning.num"
    assert said in str(caught[-1].message)


def test_an_old_name_finds_the_new_one_and_a_missing_one_says_where_it_was_looked_for():
    with pytest.warns(FutureWarning, match="has moved to rlt_lightning.engines.base"):
        module = moved.MovedFinder().create_module(
            moved.ModuleSpec("rlt_lightning.engines.verification", None)
        )
    assert module.disagreement is import_module("rlt_lightning.engines.base").find_disagreement
    with pytest.raises(AttributeError, match=r"moved to rlt_lightning\.engines\.base, .*fleet, which"):
        _ = module.nonsense


@pytest.mark.parametrize("old", moved.RENAMED)
def test_every_renamed_name_leads_to_one_that_exists(old: str):
    module, _, name = old.rpartition(".")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        found = getattr(import_module(f"rlt_lightning.{module}"), name)
    place, _, new = moved.RENAMED[old].rpartition(".")
    places = [place] if place else moved.new_places(module) or [module]
    assert found in [getattr(import_module(f"rlt_lightning.{one}"), new, None) for one in places]


def test_an_old_name_of_a_module_that_stayed_warns_and_works():
    balance = import_module("rlt_lightning.numerics.balance")
    with pytest.warns(FutureWarning, match=r"balance\.room_of is called compute_room now"):
        assert balance.room_of is balance.compute_room
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = balance.nonsense


def test_an_old_method_warns_and_calls_the_new_one():
    loader = StepLoader([*"abcd"], 2, list)
    with pytest.warns(FutureWarning, match=r"StepLoader\.more is called take_more now"):
        assert len(loader.more(2)) == 2


def test_a_module_that_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError, match="No module named"):
        import_module("rlt_lightning.never")
