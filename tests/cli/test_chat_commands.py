"""The commands inside a chat, the files that they read and write, and the history."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from diptych.api_service import Service
from diptych.chat import files
from diptych.chat.conversation import Conversation
from diptych.chat.files import MAX_HISTORY_BYTES, history_path, newer_half, prepare_history
from diptych.chat.slash import HELP, NAMES, Order, QuitChat, SlashError, obey, order_in

ASKED = {"role": "user", "content": "hi"}
TOLD = {"role": "assistant", "content": "hello"}


@pytest.fixture
def chat() -> Conversation:
    found = Conversation(Service("http://127.0.0.1:1/v1", "m", {}), {}, "be brief")
    found.turns = [ASKED, TOLD]
    return found


@pytest.mark.parametrize(
    ("line", "order"),
    [
        ("hello", None),
        ("/etc/hosts is what?", None),
        ("and /reset?", None),
        ("/reset", Order("/reset", "")),
        (" /system  be kind ", Order("/system", "be kind")),
        ("/save a b.json", Order("/save", "a b.json")),
    ],
)
def test_a_line_is_a_command_if_its_first_word_is_one(line: str, order: Order | None) -> None:
    for by_hand in (True, False):
        assert order_in(line, by_hand=by_hand) == order


def test_a_mistyped_command_is_told_to_a_person_and_sent_for_a_program() -> None:
    with pytest.raises(SlashError, match="no command /rest; /help"):
        order_in("/rest", by_hand=True)
    assert order_in("/rest", by_hand=False) is None


def test_help_lists_every_command(chat: Conversation) -> None:
    told = obey(Order("/help", ""), chat)
    assert all(usage in told and meaning in told for usage, meaning in HELP.items())


def test_quit_ends_the_chat(chat: Conversation) -> None:
    with pytest.raises(QuitChat):
        obey(Order("/quit", ""), chat)


def test_the_system_message_can_be_shown_and_set_and_outlives_a_reset(chat: Conversation) -> None:
    assert obey(Order("/system", ""), chat) == "system: be brief"
    obey(Order("/system", "be kind"), chat)
    assert chat.messages == [{"role": "system", "content": "be kind"}, ASKED, TOLD]
    obey(Order("/reset", ""), chat)
    assert chat.messages == [{"role": "system", "content": "be kind"}]


def test_what_is_said_is_no_path(chat: Conversation) -> None:
    assert obey(Order("/system", "~nobody-of-this-name"), chat) == "system: ~nobody-of-this-name"


def test_a_saved_chat_is_private_and_can_be_loaded(chat: Conversation, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    assert "3 messages" in obey(Order("/save", str(file)), chat)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    other = Conversation(Service("", "m", {}), {}, None)
    obey(Order("/load", str(file)), other)
    assert other.messages == chat.messages
    assert other.system == "be brief"
    with pytest.raises(SlashError, match="exists already"):
        obey(Order("/save", str(file)), chat)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"nonsense", "no saved chat"),
        (b'{"messages": [{"role": "user"}]}', r"messages\[0\]"),
        (b'{"messages": [{"role": "tool", "content": "a"}]}', "'tool'"),
        (b'{"messages": [{"role": "user", "content": 3}]}', "content"),
        (
            msgspec.json.encode({"messages": [ASKED, {"role": "system", "content": "a"}]}),
            r"messages\[1\] may not be a system message",
        ),
    ],
)
def test_what_is_no_saved_chat_is_refused_and_changes_nothing(
    content: bytes, said: str, chat: Conversation, tmp_path: Path
) -> None:
    before = chat.messages
    (tmp_path / "chat.json").write_bytes(content)
    with pytest.raises(SlashError, match=said):
        obey(Order("/load", str(tmp_path / "chat.json")), chat)
    assert chat.messages == before


@pytest.mark.parametrize("name", ["/image", "/save", "/load"])
def test_a_command_without_its_file_says_what_it_needs(name: str, chat: Conversation) -> None:
    assert name in NAMES
    with pytest.raises(SlashError, match="needs a file"):
        obey(Order(name, ""), chat)
    with pytest.raises(SlashError, match="/no/such/file cannot be"):
        obey(Order(name, "/no/such/file"), chat)
    for no_file in ("~nobody-of-this-name/a", "a\0b"):
        with pytest.raises(SlashError):
            obey(Order(name, no_file), chat)


def test_an_image_goes_with_the_next_message(chat: Conversation, tmp_path: Path) -> None:
    Image.new("RGB", (2, 2)).save(tmp_path / "dot.png")
    assert obey(Order("/image", str(tmp_path / "dot.png")), chat).startswith("dot.png")
    [url] = chat.images
    assert url.startswith("data:image/png;base64,iVBOR")
    obey(Order("/reset", ""), chat)
    assert chat.images == []


def test_what_is_no_image_or_too_large_is_refused(
    chat: Conversation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.png").write_bytes(b"no image")
    with pytest.raises(SlashError, match="not an image that can be read"):
        obey(Order("/image", str(tmp_path / "a.png")), chat)
    monkeypatch.setattr(files, "MAX_IMAGE_BYTES", 4)
    with pytest.raises(SlashError, match="more than 4 bytes"):
        obey(Order("/image", str(tmp_path / "a.png")), chat)


@pytest.mark.parametrize(
    ("variable", "folder"), [("/state", "/state"), ("", "HOME"), ("relative", "HOME")]
)
def test_the_history_is_in_the_folder_for_state(
    variable: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", variable)
    monkeypatch.setenv("HOME", str(tmp_path))
    state = tmp_path / ".local" / "state" if folder == "HOME" else Path(folder)
    assert history_path() == state / "diptych" / "chat_history"


def test_the_history_is_private_and_loses_its_older_half_when_it_is_long(tmp_path: Path) -> None:
    path = tmp_path / "new" / "history"
    assert prepare_history(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    entry = b"\n# 2026-01-01\n+" + b"a" * 100 + b"\n"
    path.write_bytes(entry * (MAX_HISTORY_BYTES // len(entry) + 1))
    path.chmod(0o644)
    assert prepare_history(path)
    kept = path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert MAX_HISTORY_BYTES // 4 < len(kept) <= MAX_HISTORY_BYTES // 2
    assert kept.startswith(b"# 2026-01-01\n+")
    assert kept.endswith(entry)


def test_a_history_that_cannot_be_had_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not prepare_history(tmp_path / "file" / "history")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert not prepare_history(tmp_path / "link")


def test_half_a_history_begins_with_a_whole_entry() -> None:
    long: Any = b"\n# 1\n+" + b"a" * MAX_HISTORY_BYTES + b"\n\n# 2\n+b\n"
    assert newer_half(long) == b"# 2\n+b\n"
