"""Conversations: which tokens are learned."""

import json
from pathlib import Path

import numpy as np
import pytest

from olmo_hf.data.chat_documents import ChatEncoder
from olmo_hf.data.document_sources import BadDocumentError
from olmo_hf.data.memmap import MemMapDataset
from olmo_hf.data.prepare import prepare_data
from olmo_hf.data.prepare_options import PrepareOptions
from olmo_hf.data.tokenizer_files import (
    EOS_TOKEN,
    PAD_TOKEN,
    TRICKY_TEXTS,
    raw_tokenizer,
    read_tokenizer,
    save_tokenizer,
    train_tokenizer,
)

OTHER_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{{ eos_token if m.role == 'assistant' else '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(folder: Path, chat_template: str | None = None) -> str:
    texts = [*TRICKY_TEXTS, "<|user|>\nHello<|assistant|>\nHi there"] * 5
    save_tokenizer(
        train_tokenizer(iter(texts), 400),
        folder,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        chat_template=chat_template,
    )
    return str(folder)


def encoder(folder: str) -> ChatEncoder:
    return ChatEncoder(read_tokenizer(folder), raw_tokenizer(folder))


MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": " Hi! "},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "4"},
]


def test_the_layout_of_the_original(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path)
    chat = encoder(folder)
    tokens, flags = chat.encode(chat.render(MESSAGES, "x:1"))
    raw = raw_tokenizer(folder)

    def text(chosen: np.ndarray) -> str:
        return raw.decode(chosen.tolist(), skip_special_tokens=False)

    assert text(tokens) == (
        f"{EOS_TOKEN}<|system|>\nBe kind.\n<|user|>\nHello?\n<|assistant|>\nHi!{EOS_TOKEN}\n"
        f"<|user|>\n2+2\n<|assistant|>\n4{EOS_TOKEN}"
    )
    # Learned: what the assistant says and where it stops; never the new line behind, nor the layout.
    assert text(tokens[flags]) == f"Hi!{EOS_TOKEN}4{EOS_TOKEN}"
    assert tokens[-1] == 0
    assert flags[-1]


def test_a_tokenizers_own_template(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path, OTHER_TEMPLATE)
    chat = encoder(folder)
    tokens, flags = chat.encode(chat.render(MESSAGES, "x:1"))
    raw = raw_tokenizer(folder)
    assert raw.decode(tokens.tolist(), skip_special_tokens=False).startswith("<system>Be kind.\n<user>Hello?")
    assert raw.decode(tokens[flags].tolist(), skip_special_tokens=False) == f" Hi! {EOS_TOKEN}4{EOS_TOKEN}"


def test_an_end_is_added_and_learned_where_the_template_has_none(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    folder = make_tokenizer(tmp_path, template)
    chat = encoder(folder)
    tokens, flags = chat.encode(chat.render(MESSAGES[1:3], "x:1"))
    assert np.count_nonzero(tokens == 0) == 1
    assert tokens[-1] == 0
    assert flags[-1]


def test_an_assistant_that_speaks_first(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path)
    chat = encoder(folder)
    tokens, flags = chat.encode(chat.render(MESSAGES[2:4], "x:1"))
    assert raw_tokenizer(folder).decode(tokens[flags].tolist(), skip_special_tokens=False) == f"Hi!{EOS_TOKEN}"


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("text", "expected a list of messages"),
        ([{"role": "user", "content": "x"}], "has no assistant message"),
        ([{"role": "assistant", "content": "x"}, {"content": "x"}], "cannot be rendered"),
        ([], "has no assistant message"),
    ],
)
def test_what_is_no_conversation(tmp_path: Path, messages: object, said: str) -> None:
    with pytest.raises(BadDocumentError, match=said):
        encoder(make_tokenizer(tmp_path)).render(messages, "x:1")


def test_prepared_masks_lie_beside_the_tokens(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "tokenizer")
    lines = [
        json.dumps({"messages": MESSAGES}),
        json.dumps({"messages": MESSAGES[:2]}),
        json.dumps({"messages": MESSAGES[1:3]}),
    ]
    (tmp_path / "s.jsonl").write_text("\n".join(lines) + "\n")
    report = prepare_data(
        PrepareOptions(
            sources=(str(tmp_path / "s.jsonl"),),
            output=str(tmp_path / "out"),
            tokenizer=folder,
            messages_column="messages",
            validation_fraction=0.0,
        )
    )
    assert report.num_bad == 1
    manifest = report.manifests["train"]
    (file,) = manifest.files
    assert (file.num_documents, file.label_mask) == (2, "label_mask/00000.npy")
    train = tmp_path / "out" / "train"
    data = MemMapDataset(
        [str(train / file.path)],
        sequence_length=file.num_tokens,
        token_dtype=manifest.token_dtype,
        label_mask_paths=[str(train / "label_mask" / "00000.npy")],
    )
    item = data[0]
    raw = raw_tokenizer(folder)
    learned = raw.decode(item["input_ids"][item["label_mask"]].tolist(), skip_special_tokens=False)
    assert learned == f"Hi!{EOS_TOKEN}4{EOS_TOKEN}Hi!{EOS_TOKEN}"
