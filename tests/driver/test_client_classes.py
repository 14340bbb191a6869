"""Who gets which class: the supervisor's rules alone."""

from __future__ import annotations

import os

import pytest

from nnfmq.base.channel import Credentials
from nnfmq.driver.process.client_classes import class_without_request, why_not_changed, why_not_given
from nnfmq.hal.client_class import ClientClass

BATCH, NORMAL, INTERACTIVE = ClientClass.BATCH, ClientClass.NORMAL, ClientClass.INTERACTIVE
ME = os.getuid()
STRANGER = ME + 1000


def client(uid: int) -> Credentials:
    return Credentials(0, uid, uid)


@pytest.mark.parametrize(
    ("rules", "uid", "expected"),
    [
        ("", ME, NORMAL),
        (f"{STRANGER}=batch", STRANGER, BATCH),
        (f"{STRANGER}=batch", ME, NORMAL),
        (f"{ME}=interactive,{ME}=batch", ME, INTERACTIVE),
        ("PROGRAM=batch", STRANGER, BATCH),
        (f"{ME}/PROGRAM=batch", ME, BATCH),
        (f"{ME}/PROGRAM=batch", STRANGER, NORMAL),
        (f"{ME}/other=batch,other=interactive", ME, NORMAL),
    ],
)
def test_the_first_rule_about_a_client_gives_it_its_class(
    monkeypatch: pytest.MonkeyPatch, rules: str, uid: int, expected: ClientClass
) -> None:
    monkeypatch.setenv("NNFMQ_CLIENT_CLASSES", rules)
    assert class_without_request(client(uid), "PROGRAM") is expected


def test_a_rule_is_the_highest_class_that_a_client_gets_by_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNFMQ_CLIENT_CLASSES", f"{STRANGER}=interactive,{ME}=batch")
    monkeypatch.setenv("NNFMQ_INTERACTIVE_UIDS", str(ME))
    assert not any(why_not_given(client(STRANGER), "x", wanted) for wanted in ClientClass)
    assert not why_not_given(client(ME), "x", BATCH)
    assert "it has batch by $NNFMQ_CLIENT_CLASSES" in why_not_given(client(ME), "x", NORMAL)


def test_without_a_setting_the_driver_s_user_and_root_get_interactive_by_asking() -> None:
    assert not why_not_given(client(ME), "x", INTERACTIVE) and not why_not_given(client(0), "x", INTERACTIVE)
    assert f"allowed are uid {ME} and root" in why_not_given(client(STRANGER), "x", INTERACTIVE)
    assert not why_not_given(client(STRANGER), "x", NORMAL)


def test_only_the_driver_s_user_and_root_change_others() -> None:
    assert not why_not_changed(client(ME), client(STRANGER), "x", INTERACTIVE, is_own=False)
    assert not why_not_changed(client(0), client(STRANGER), "x", INTERACTIVE, is_own=False)
    for wanted in ClientClass:
        text = why_not_changed(client(STRANGER), client(STRANGER + 1), "x", wanted, is_own=False)
        assert text.startswith(f"uid {STRANGER} does not administer this driver")
    assert not why_not_changed(client(STRANGER), client(STRANGER), "x", BATCH, is_own=True)
    assert why_not_changed(client(STRANGER), client(STRANGER), "x", INTERACTIVE, is_own=True)
