"""Sources, the split, the tokenizer, packing."""

import json
from itertools import chain, islice

import numpy as np
import pytest
import torch

from hf_ssm import data
from hf_ssm.data import (
    DataConfig,
    DataError,
    PackedBlocks,
    PackedCollator,
    StreamedBlocks,
    load_corpus,
    pack,
    pack_corpus,
    stable_fraction,
    stdlib_documents,
    stdlib_files,
    token_byte_lengths,
    train_tokenizer,
)

TEXTS = ["def f(x):\n    return x + 1\n", "naïve — 日本語 🙂\n", "class A:\n    pass\n" * 5, "a , b\t\r\n  c"] * 6


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, vocab_size=300)


def write_records(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


# ---------------------------------------------------------------- sources


def test_the_standard_library_is_found_without_tests_and_installed_packages():
    keys = [document.key for document in stdlib_documents()]
    assert keys == sorted(keys) and len(keys) == len(set(keys)) == len(stdlib_files())
    assert {"abc.py", "json/decoder.py"} <= set(keys)
    assert not [key for key in keys if {"test", "tests", "site-packages", "encodings"} & set(key.split("/"))]


def test_the_split_depends_on_the_key_alone():
    # Numbers from the definition, written down: they may never change, or a model is validated on what it has read.
    assert [round(stable_fraction(key), 6) for key in ("abc.py", "json/decoder.py", "")] == [
        0.80849, 0.450801, 0.866604,
    ]  # fmt: skip


def test_train_and_validation_share_nothing_and_miss_nothing(tmp_path):
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    corpus = load_corpus(DataConfig(source=str(tmp_path), validation_fraction=0.3))
    train, validation = set(corpus.train()), set(corpus.validation())
    assert train.isdisjoint(validation) and len(train | validation) == 40 and 4 < len(validation) < 20
    assert list(corpus.validation()) == list(corpus.validation()) and list(corpus.train()) == list(corpus.train())


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("fraction", [0.001, 0.5, 0.999])
def test_few_documents_leave_none_of_the_sides_empty(tmp_path, count, fraction):
    for number in range(count):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    corpus = load_corpus(DataConfig(source=str(tmp_path), validation_fraction=fraction))
    sides = [list(corpus.train()), list(corpus.validation())]
    assert all(sides) and sum(map(len, sides)) == count


@pytest.mark.parametrize("text", ["".join(f"line {i}\n" for i in range(100)), "no line end at all", "ab"])
def test_a_single_text_is_split_near_its_end(tmp_path, text):
    path = tmp_path / "book.txt"
    path.write_text(text)
    corpus = load_corpus(DataConfig(source=str(path), validation_fraction=0.1))
    (train,), (validation,) = corpus.train(), corpus.validation()
    assert train + validation == text and train and validation


def test_a_long_text_file_becomes_several_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "PIECE_CHARS", 100)
    text = "".join(f"line {i}\n" for i in range(60))
    (tmp_path / "long.txt").write_text(text)
    documents = list(data.file_documents(tmp_path / "long.txt", "text"))
    assert len(documents) > 3 and "".join(document.text for document in documents) == text
    assert all(document.text.endswith("\n") for document in documents)


def test_a_folder_mixes_text_and_json_lines_and_ignores_hidden_files(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_bytes(b"\xef\xbb\xbfwith a mark\r\n")
    (tmp_path / ".hidden").write_bytes(b"\xff\xfe")
    write_records(tmp_path / "b.jsonl", [{"body": "one"}, {"body": "two"}])
    texts = [document.text for document in data.file_documents(tmp_path, "body")]
    assert texts == ["one", "two", "with a mark\r\n"]


def test_equal_records_land_on_the_same_side(tmp_path):
    path = write_records(tmp_path / "a.jsonl", [{"text": f"text {number % 10}"} for number in range(50)])
    corpus = load_corpus(DataConfig(source=path, validation_fraction=0.4))
    assert set(corpus.train()).isdisjoint(corpus.validation())


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"text": "a"}\n\n{"text": \n', r"bad\.jsonl, line 3: not JSON"),
        (b'{"text": "\xff"}\n', r"bad\.jsonl, line 1: not JSON"),
        ('{"text": "a"}\n["b"]\n', r"line 2: a JSON object is expected, found list"),
        ('{"body": "a", "id": 1}\n', r"line 1: no field 'text' among \['body', 'id'\]; set data\.field"),
        ('{"text": 7}\n', r"line 1: field 'text' holds int, not text"),
        ("\n\n", "contains no text"),
    ],
)
def test_bad_json_lines_are_named(tmp_path, content, complaint):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=complaint):
        load_corpus(DataConfig(source=str(path)))


def test_missing_empty_and_binary_sources_are_named(tmp_path):
    with pytest.raises(DataError, match=r"'nowhere\.txt' does not exist"):
        load_corpus(DataConfig(source="nowhere.txt"))
    with pytest.raises(DataError, match="contains no text"):
        load_corpus(DataConfig(source=str(tmp_path)))
    (tmp_path / "picture.txt").write_bytes(b"\x89PNG\xff")
    with pytest.raises(DataError, match=r"picture\.txt is not UTF-8 text"):
        load_corpus(DataConfig(source=str(tmp_path)))


def test_texts_that_are_all_the_same_cannot_be_split(tmp_path):
    path = write_records(tmp_path / "a.jsonl", [{"text": "same"}] * 3)
    with pytest.raises(DataError, match="the same text"):
        load_corpus(DataConfig(source=path))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"validation_fraction": 0.0}, "validation_fraction"),
        ({"block_length": 1}, "block_length"),
        ({"validation_blocks": 0}, "validation_blocks"),
        ({"streaming": True}, "data.streaming needs data.validation_blocks"),
    ],
)
def test_impossible_settings_are_refused(settings, complaint):
    with pytest.raises(DataError, match=complaint):
        DataConfig(**settings)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_dataset_by_name(monkeypatch, streaming):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(name, config, *, split, streaming):
        asked.append((name, config, split, streaming))
        found = datasets.Dataset.from_list([{"body": f"{split} {number}"} for number in range(30)])
        return found.to_iterable_dataset() if streaming else found

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = DataConfig(
        source="someone/texts", name="en", field="body", validation_fraction=0.2, streaming=streaming,
        validation_blocks=5,
    )  # fmt: skip
    corpus = load_corpus(config)
    train, validation = set(corpus.train()), set(corpus.validation())
    assert len(train) + len(validation) == 30 and train.isdisjoint(validation) and validation
    assert set(asked) == {("someone/texts", "en", "train", streaming)}

    corpus = load_corpus(DataConfig(source="someone/texts", field="body", validation_split="test"))
    assert len(list(corpus.train())) == len(list(corpus.validation())) == 30
    assert next(corpus.validation()).startswith("test")
    with pytest.raises(DataError, match=r"train record 0: no field 'text' among \['body'\]"):
        load_corpus(DataConfig(source="someone/texts"))


@pytest.mark.parametrize(
    ("error", "complaint"),
    [
        (ConnectionError("no network"), "no file or folder here, and cannot be fetched as a dataset: no network"),
        (FileNotFoundError("not on the Hub"), "dataset 'someone/texts', split 'train': not on the Hub"),
        (ValueError("BuilderConfig 'xx' not found"), "BuilderConfig 'xx' not found"),
    ],
)
def test_a_dataset_that_cannot_be_loaded(monkeypatch, error, complaint):
    datasets = pytest.importorskip("datasets")

    def load_dataset(*args, **kwargs):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=complaint):
        load_corpus(DataConfig(source="someone/texts"))


def test_a_validation_split_is_for_datasets(tmp_path):
    with pytest.raises(DataError, match="validation_split is for datasets"):
        load_corpus(DataConfig(source=str(tmp_path), validation_split="test"))


# ---------------------------------------------------------------- tokens


@pytest.mark.parametrize("text", [*TEXTS[:4], "<|endoftext|> <|pad|>", "\x00\x7f\u200b", " leading"])
def test_every_text_survives_the_tokenizer_and_its_bytes_are_counted(tokenizer, text):
    ids = tokenizer(text, split_special_tokens=True)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert not {tokenizer.eos_token_id, tokenizer.pad_token_id} & set(ids)
    assert token_byte_lengths(tokenizer)[ids].sum() == len(text.encode())


def test_special_tokens_stand_for_no_text(tokenizer):
    lengths = token_byte_lengths(tokenizer)
    assert lengths.shape == (len(tokenizer),)
    assert lengths[tokenizer.eos_token_id] == lengths[tokenizer.pad_token_id] == 0


def test_bytes_of_a_sentencepiece_like_vocabulary():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = models.BPE(vocab={"</s>": 0, "<0xE2>": 1, "▁the": 2, "é": 3}, merges=[])
    backend = Tokenizer(model)
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    assert token_byte_lengths(tokenizer).tolist() == [0, 1, 4, 2]


def test_the_same_texts_give_the_same_tokenizer(tokenizer):
    again = train_tokenizer(iter(TEXTS), vocab_size=300)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert len(tokenizer) == 300


def test_a_saved_tokenizer_reloads_as_it_was(tokenizer, tmp_path):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer.save_pretrained(tmp_path)
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(reloaded, PreTrainedTokenizerFast)
    assert (reloaded.eos_token, reloaded.pad_token) == (data.END_OF_TEXT, data.PAD)
    assert reloaded(TEXTS[1])["input_ids"] == tokenizer(TEXTS[1])["input_ids"]


def test_a_vocabulary_too_small_for_the_bytes_is_refused():
    with pytest.raises(DataError, match="at least 258"):
        train_tokenizer(TEXTS, vocab_size=257)


# ---------------------------------------------------------------- packing


def packed(tokenizer, texts, block_length=16):
    return np.stack(list(pack(texts, tokenizer, block_length)))


def test_packing_chains_the_documents(tokenizer):
    eos = tokenizer.eos_token_id
    chained = list(chain.from_iterable([*tokenizer(text)["input_ids"], eos] for text in TEXTS))
    blocks = packed(tokenizer, TEXTS)
    assert blocks.dtype == np.int32 and blocks.shape[1] == 16
    flat = blocks.flatten().tolist()
    assert flat[: len(chained)] == chained and set(flat[len(chained) :]) <= {eos}


def test_packing_does_not_depend_on_how_documents_are_batched(tokenizer, monkeypatch):
    want = packed(tokenizer, TEXTS)
    monkeypatch.setattr(data, "ENCODE_BATCH", 3)
    assert np.array_equal(packed(tokenizer, iter(TEXTS)), want)


def test_packing_leaves_out_empty_documents_and_a_lone_last_token(tokenizer):
    assert not list(pack(["", ""], tokenizer, 8))
    ids = tokenizer("abcdefg")["input_ids"]
    blocks = packed(tokenizer, ["abcdefg"], block_length=len(ids))  # only the end-of-text token is left over
    assert blocks.tolist() == [ids]


def test_packing_needs_an_end_of_text_token(tokenizer):
    from transformers import PreTrainedTokenizerFast

    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(DataError, match="no end-of-text token"):
        next(pack(TEXTS, bare, 8))


def test_the_collator_restarts_positions_and_drops_first_tokens_from_the_loss():
    eos = 9
    rows = [[1, 2, eos, 3, eos, 4], [eos, 1, 2, 3, eos, eos]]
    batch = PackedCollator(eos)([{"input_ids": torch.tensor(row)} for row in rows])
    assert batch["input_ids"].tolist() == rows
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 0]]
    assert batch["labels"].tolist() == [[-100, 2, eos, -100, eos, -100], [-100, -100, 2, 3, eos, -100]]


def test_a_streamed_corpus_has_the_same_blocks(tmp_path, tokenizer):
    path = write_records(tmp_path / "a.jsonl", [{"text": f"{number} {text}"} for number, text in enumerate(TEXTS)])
    settings = {"source": path, "validation_fraction": 0.2, "validation_blocks": 2, "block_length": 16}
    config, stream = DataConfig(**settings), DataConfig(**settings, streaming=True)
    want = pack_corpus(load_corpus(config), tokenizer, config)
    got = pack_corpus(load_corpus(stream), tokenizer, stream)
    assert isinstance(want.train, PackedBlocks) and isinstance(got.train, StreamedBlocks)
    for _ in range(2):  # it can be read again, and without an end
        streamed = [block["input_ids"] for block in islice(got.train, 2 * len(want.train))]
        assert torch.equal(torch.stack(streamed), torch.from_numpy(want.train.ids).long().repeat(2, 1))
    assert len(got.validation) == len(want.validation) == 2


def test_workers_share_a_stream(tokenizer):
    blocks = StreamedBlocks(lambda: iter(TEXTS), tokenizer, 16)
    loader = torch.utils.data.DataLoader(blocks, batch_size=None, num_workers=2)
    turns = [block["input_ids"] for block in islice(loader, 12)]
    for worker in (0, 1):
        want = torch.from_numpy(packed(tokenizer, TEXTS[worker::2])[:6]).long()
        assert torch.equal(torch.stack(turns[worker::2]), want)


def test_the_fingerprint_tells_data_apart(tokenizer):
    one, other = packed(tokenizer, TEXTS), packed(tokenizer, TEXTS[1:])
    assert PackedBlocks(one).fingerprint() == PackedBlocks(one.copy()).fingerprint()
    assert PackedBlocks(one).fingerprint() != PackedBlocks(other).fingerprint()


def test_one_character_on_each_side_still_packs(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("ab")
    config = DataConfig(source=str(tmp_path / "a.txt"))
    packed_data = pack_corpus(load_corpus(config), tokenizer, config)
    assert len(packed_data.train) == len(packed_data.validation) == 1


def test_a_side_without_text_is_named(tmp_path, tokenizer):
    path = write_records(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    for fraction, purpose in ((0.0001, "validate"), (0.9999, "train")):
        config = DataConfig(source=path, validation_fraction=fraction, streaming=True, validation_blocks=1)
        with pytest.raises(DataError, match=f"leaves no text to {purpose} on"):
            for _ in pack_corpus(load_corpus(config), tokenizer, config).train:
                pass
