"""Text in, packed blocks of tokens out.

The path of a document: a source (Python's own standard library, a text file, a JSON-lines file, a folder of both, or
a `datasets` name) yields `Document`s; a stable hash of each document's key puts it into train or validation; a
tokenizer turns it into ids; `pack` chains the ids of all documents, each closed by the end-of-text token, and cuts
the chain into blocks of one length. `PackedCollator` tells the model where documents begin, so that a recurrent
state starts afresh there; `MaskedLMCollator` also hides tokens for a masked language model to find.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
CLS = "<|cls|>"
MASK = "<|mask|>"
IGNORED_LABEL = -100  # what torch's cross entropy skips

STDLIB = "stdlib"
# Tests are written unlike the rest, `encodings` is mostly number tables, and `pydoc_data` is one generated text.
STDLIB_EXCLUDED = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data",
}  # fmt: skip
JSON_LINES_SUFFIXES = {".jsonl", ".ndjson", ".json"}
TEXT_SUFFIXES = {".txt", ".md", ".rst", ".py"}  # only to tell a mistyped path from the name of a dataset
PIECE_CHARS = 1 << 20  # a longer text file is cut into several documents, so that memory stays bounded
TOKENIZER_SAMPLE_BYTES = 50_000_000  # more text does not change a small vocabulary
ENCODE_BATCH = 64  # documents handed to the tokenizer at a time: enough for its threads


class DataError(ValueError):
    """The text asked for is missing, empty or unreadable. The message names the file, line or setting."""


@dataclass(frozen=True)
class DataConfig:
    """Where text comes from and how it is cut. The `data:` section of a recipe.

    source                "stdlib", a path (text file, JSON-lines file, folder of such) or the name of a dataset
    name, split           configuration and split of a dataset; not for paths
    validation_split      split of the dataset to validate on; without it, `validation_fraction` of the documents
    field                 which field of a record holds its text (JSON lines and datasets)
    validation_fraction   in (0, 1): share of the documents, chosen by a hash that never changes
    validation_blocks     at most so many blocks are evaluated; None is all of them (not when streaming)
    block_length          tokens per block, >= 2
    streaming             read and tokenise during training, in the order of the source, instead of before it
    """

    source: str = STDLIB
    name: str | None = None
    split: str = "train"
    validation_split: str | None = None
    field: str = "text"
    validation_fraction: float = 0.05
    validation_blocks: int | None = None
    block_length: int = 512
    streaming: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.validation_fraction < 1:
            raise DataError(f"data.validation_fraction must lie between 0 and 1, not {self.validation_fraction}")
        if self.block_length < 2:
            raise DataError(f"data.block_length must be at least 2 tokens, not {self.block_length}")
        if self.validation_blocks is not None and self.validation_blocks < 1:
            raise DataError(f"data.validation_blocks must be at least 1, not {self.validation_blocks}")
        if self.streaming and self.validation_blocks is None:
            raise DataError("data.streaming needs data.validation_blocks: how many blocks of the stream to evaluate")


class Document(NamedTuple):
    """One text. Its `key` decides between train and validation and must not depend on the machine."""

    key: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Train and validation texts; both can be read any number of times, in the same order every time."""

    train: Callable[[], Iterator[str]]
    validation: Callable[[], Iterator[str]]
    description: str


# ---------------------------------------------------------------- sources


def stdlib_files(root: Path | None = None) -> list[Path]:
    """The Python sources of the standard library (or of `root`), in an order that does not depend on the machine."""
    root = root or Path(sysconfig.get_path("stdlib"))
    files = [path for path in root.rglob("*.py") if not STDLIB_EXCLUDED & set(path.relative_to(root).parts)]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def stdlib_documents(root: Path | None = None) -> Iterator[Document]:
    """One document per source file of the standard library, keyed by its path inside it."""
    root = root or Path(sysconfig.get_path("stdlib"))
    for path in stdlib_files(root):
        text = path.read_bytes().decode("utf-8", errors="replace")
        yield Document(path.relative_to(root).as_posix(), text)


def file_documents(path: Path, field: str) -> Iterator[Document]:
    """The documents of a text file, a JSON-lines file, or a folder of both (hidden files are left out).

    A text file is one document, or several if it is long. Raises DataError naming the file, and the line where one
    is at fault.
    """
    if path.is_dir():
        visible = (p for p in path.rglob("*") if not any(part[0] == "." for part in p.relative_to(path).parts))
        files = sorted((p for p in visible if p.is_file()), key=lambda p: p.relative_to(path).as_posix())
        root = path
    else:
        files, root = [path], path.parent
    for file in files:
        if file.suffix.lower() in JSON_LINES_SUFFIXES:
            yield from _json_lines_documents(file, field)
        else:
            yield from _text_documents(file, file.relative_to(root).as_posix())


def _text_documents(path: Path, key: str) -> Iterator[Document]:
    with path.open(encoding="utf-8-sig", newline="") as stream:
        try:
            for number in count():
                piece = stream.read(PIECE_CHARS)
                if not piece:
                    return
                if len(piece) == PIECE_CHARS:
                    piece += stream.readline()  # cut at the end of a line
                yield Document(f"{key}#{number}", piece)
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8 text ({error.reason})") from None


def _json_lines_documents(path: Path, field: str) -> Iterator[Document]:
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                record = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise DataError(f"{where}: not JSON ({error}); one JSON object per line is expected") from None
            if not isinstance(record, dict):
                raise DataError(f"{where}: a JSON object is expected, found {type(record).__name__}")
            text = _field_of(record, field, where)
            yield Document(text, text)  # keyed by content: a text that occurs twice never lands on both sides


def _field_of(record: dict[str, Any], field: str, where: str) -> str:
    if field not in record:
        raise DataError(f"{where}: no field {field!r} among {sorted(record)}; set data.field")
    text = record[field]
    if not isinstance(text, str):
        raise DataError(f"{where}: field {field!r} holds {type(text).__name__}, not text; set data.field")
    return text


def dataset_documents(config: DataConfig, split: str) -> Iterator[Document]:
    """The records of a split of a dataset that `datasets` can load. Raises DataError if it cannot."""
    try:
        import datasets
    except ImportError:
        raise DataError("reading a dataset by name needs the datasets package: pip install 'hf-ssm[train]'") from None
    try:
        records = datasets.load_dataset(config.source, config.name, split=split, streaming=config.streaming)
    except ConnectionError as error:
        raise DataError(
            f"data.source: {config.source!r} is no file or folder here, and cannot be fetched as a dataset: {error}. "
            "Check the spelling, or the connection (offline, only datasets already in the cache can be used)"
        ) from error
    except (OSError, ValueError) as error:  # not found, no such configuration, no such split
        raise DataError(f"data.source: dataset {config.source!r}, split {split!r}: {error}") from error
    for number, record in enumerate(records):
        text = _field_of(record, config.field, f"{config.source}, {split} record {number}")
        yield Document(text, text)


def load_corpus(config: DataConfig) -> Corpus:
    """Open `config.source` and split it. Raises DataError if it is missing or empty.

    Without `streaming` every document is read once here, so that each side is sure to have one: if the hash puts no
    document (or all of them) on a side, the nearest one by hash changes sides; a lone document is split near its end.
    """
    if config.validation_split is not None:
        if config.source == STDLIB or _is_path(config.source):
            raise DataError("data.validation_split is for datasets; a path is split by data.validation_fraction")
        validation_split = config.validation_split
        return Corpus(
            train=lambda: _texts(dataset_documents(config, config.split)),
            validation=lambda: _texts(dataset_documents(config, validation_split)),
            description=f"{config.source} ({config.split}, validated on {validation_split})",
        )

    documents, description = _open(config)
    threshold = config.validation_fraction
    if not config.streaming:
        places = sorted(stable_fraction(document.key) for document in documents() if document.text)
        if not places:
            raise DataError(f"data.source: {config.source} contains no text")
        if len(places) == 1:
            return _split_one_document(documents, description, config.validation_fraction)
        # Between the smallest and the largest, so that both sides have a document.
        threshold = min(max(threshold, np.nextafter(places[0], 1)), places[-1])
        if places[0] == places[-1]:
            raise DataError(f"data.source: all {len(places)} documents of {config.source} are the same text")

    def validation() -> Iterator[str]:
        chosen: Iterable[Document]
        chosen = (document for document in documents() if stable_fraction(document.key) < threshold)
        if not config.streaming:  # by hash, so that the first few are as mixed as all of them
            chosen = sorted(chosen, key=lambda document: stable_fraction(document.key))
        return _texts(chosen)

    return Corpus(
        train=lambda: _texts(document for document in documents() if stable_fraction(document.key) >= threshold),
        validation=validation,
        description=description,
    )


def stable_fraction(key: str) -> float:
    """A number in [0, 1) from the text of `key`: evenly spread, and the same in every run and on every machine."""
    return int.from_bytes(hashlib.blake2b(key.encode(errors="replace"), digest_size=6).digest(), "big") / 2**48


def _open(config: DataConfig) -> tuple[Callable[[], Iterator[Document]], str]:
    if config.source == STDLIB:
        return stdlib_documents, "the source of Python's standard library"
    if _is_path(config.source):
        path = Path(config.source).expanduser()
        if not path.exists():
            raise DataError(f"data.source: {config.source!r} does not exist (current folder: {Path.cwd()})")
        return (lambda: file_documents(path, config.field)), str(path)
    return (lambda: dataset_documents(config, config.split)), f"{config.source} ({config.split})"


def _is_path(source: str) -> bool:
    looks_like_one = source.startswith(("/", ".", "~")) or source.endswith("/")
    known_suffix = Path(source).suffix.lower() in JSON_LINES_SUFFIXES | TEXT_SUFFIXES
    return looks_like_one or known_suffix or Path(source).exists()


def _texts(documents: Iterable[Document]) -> Iterator[str]:
    return (document.text for document in documents if document.text)


def _split_one_document(documents: Callable[[], Iterator[Document]], description: str, fraction: float) -> Corpus:
    text = next(_texts(documents()))
    lines = text.splitlines(keepends=True)
    parts: list[str] = lines if len(lines) > 1 else list(text)
    cut = min(max(round(len(parts) * (1 - fraction)), 1), len(parts) - 1)
    if cut == 0:
        raise DataError(f"data.source: {description} holds a single character, nothing is left to validate on")
    train, validation = "".join(parts[:cut]), "".join(parts[cut:])
    return Corpus(lambda: iter([train]), lambda: iter([validation]), f"{description} (its end kept for validation)")


# ---------------------------------------------------------------- tokens


def train_tokenizer(texts: Iterable[str], vocab_size: int, *, masked: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level byte-pair tokenizer: every text can be encoded, and decodes to itself.

    vocab_size counts the special tokens (end of text, padding) and the 256 bytes, so it is at least 258. With
    `masked` there are two more, <|cls|> and <|mask|>, and a text or a pair of texts is framed as BERT does it, the end
    of text in the place of [SEP]. The same texts give the same tokenizer. Only the first 50 MB are looked at.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [END_OF_TEXT, PAD, *([CLS, MASK] if masked else [])]
    smallest = len(alphabet) + len(special)
    if vocab_size < smallest:
        raise DataError(f"tokenizer.vocab_size must be at least {smallest}, not {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_first_bytes(texts, TOKENIZER_SAMPLE_BYTES), trainer)
    if masked:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{CLS} $A {END_OF_TEXT}",
            pair=f"{CLS} $A {END_OF_TEXT} $B:1 {END_OF_TEXT}:1",
            special_tokens=[(token, special.index(token)) for token in (CLS, END_OF_TEXT)],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        **({"cls_token": CLS, "sep_token": END_OF_TEXT, "mask_token": MASK} if masked else {}),
        clean_up_tokenization_spaces=False,  # it would drop the space in "x , y"
    )


def _first_bytes(texts: Iterable[str], limit: int) -> Iterator[str]:
    for text in texts:
        yield text
        limit -= len(text)
        if limit <= 0:
            return


def token_byte_lengths(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """How many bytes of text each token stands for: (len(tokenizer),) int64, 0 for special tokens.

    Exact for byte-level tokenizers (GPT-2, GPT-NeoX, ours) and for SentencePiece-like ones that lose no text.
    """
    lengths = torch.zeros(len(tokenizer), dtype=torch.long)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    byte_level = backend is not None and "ByteLevel" in json.dumps(json.loads(backend.to_str())["decoder"])
    alphabet: set[str] = set()
    if byte_level:
        from tokenizers import pre_tokenizers

        alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    special = set(tokenizer.all_special_ids)
    for token, index in tokenizer.get_vocab().items():
        if index in special:
            continue
        if byte_level and alphabet.issuperset(token):
            lengths[index] = len(token)  # one character of the alphabet per byte
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            lengths[index] = 1  # SentencePiece's byte fallback
        else:
            lengths[index] = len(token.replace("▁", " ").encode())
    return lengths


def pack(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, block_length: int, *, framed: bool = False
) -> Iterator[np.ndarray]:
    """Cut the tokens of all texts, each closed by the end-of-text token, into (block_length,) int32 arrays.

    The last block is filled up with end-of-text tokens, which the collators leave out of the loss. Text that looks
    like a special token stays text. `framed` puts the tokenizer's own special tokens around each text, as an encoder
    will meet it later: [CLS] ... [SEP] for BERT's. Holds one block and `ENCODE_BATCH` documents at a time.
    """
    end = end_token_id(tokenizer, framed=framed)
    frame = tokenizer.num_special_tokens_to_add() if framed else 0
    buffer = np.empty(0, dtype=np.int32)
    for batch in _batches(texts, ENCODE_BATCH):
        encoded = tokenizer(
            batch,
            add_special_tokens=framed,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        documents = (ids if ids[-1] == end else [*ids, end] for ids in encoded if len(ids) > frame)
        buffer = np.concatenate([buffer, np.fromiter(chain.from_iterable(documents), dtype=np.int32)])
        full = len(buffer) // block_length * block_length
        yield from buffer[:full].reshape(-1, block_length)
        buffer = buffer[full:]
    if len(buffer) > 1:  # one token alone predicts nothing
        yield np.concatenate([buffer, np.full(block_length - len(buffer), end, dtype=np.int32)])


def _batches(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    iterator = iter(texts)
    while batch := list(islice(iterator, size)):
        yield batch


def end_token_id(tokenizer: PreTrainedTokenizerBase, *, framed: bool = False) -> int:
    """The token that ends a document: end of text, or, for an encoder's `framed` texts, [SEP] where there is none.

    Raises DataError if the tokenizer has neither.
    """
    end = tokenizer.eos_token_id
    if end is None and framed:
        end = tokenizer.sep_token_id
    if end is None:
        raise DataError("the tokenizer has no end-of-text token; set its eos_token, documents are separated by it")
    return int(end)


class PackedBlocks(Dataset):
    """Blocks in memory: ids (number of blocks, block_length) int32."""

    def __init__(self, ids: np.ndarray):
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.from_numpy(self.ids[index].astype(np.int64))}

    def fingerprint(self) -> str:
        """Equal for equal blocks: a resumed run must see the data it was started with."""
        return hashlib.blake2b(np.ascontiguousarray(self.ids).tobytes(), digest_size=8).hexdigest()


class StreamedBlocks(IterableDataset):
    """Blocks made while training reads them, in the order of `texts()`, over and over again without an end.

    An end would begin a new epoch, which a resumed `Trainer` cannot find again in data of unknown length. With several
    loader workers, each takes every n-th document.
    """

    def __init__(
        self,
        texts: Callable[[], Iterator[str]],
        tokenizer: PreTrainedTokenizerBase,
        block_length: int,
        *,
        framed: bool = False,
    ):
        self.texts, self.tokenizer, self.block_length, self.framed = texts, tokenizer, block_length, framed

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        empty = False
        while not empty:
            texts = islice(self.texts(), first, None, step)
            empty = True
            for ids in pack(texts, self.tokenizer, self.block_length, framed=self.framed):
                empty = False
                yield {"input_ids": torch.from_numpy(ids.astype(np.int64))}
        if worker is None:  # another worker may have more text
            raise DataError("data.source: the stream leaves no text to train on; change data.validation_fraction")


@dataclass(frozen=True)
class PackedData:
    """Blocks to train and to validate on, and what is known of them."""

    train: PackedBlocks | StreamedBlocks
    validation: PackedBlocks
    description: str

    @property
    def fingerprint(self) -> str:
        train = self.train.fingerprint() if isinstance(self.train, PackedBlocks) else "stream"
        return f"{train}-{self.validation.fingerprint()}"


def pack_corpus(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, config: DataConfig, *, framed: bool = False
) -> PackedData:
    """Both sides of `corpus` as blocks, see `pack`. Raises DataError if a side is empty."""
    length = config.block_length
    validating = islice(pack(corpus.validation(), tokenizer, length, framed=framed), config.validation_blocks)
    validation = _in_memory(validating, corpus, "validate")
    train: PackedBlocks | StreamedBlocks
    if config.streaming:
        train = StreamedBlocks(corpus.train, tokenizer, length, framed=framed)
    else:
        train = _in_memory(pack(corpus.train(), tokenizer, length, framed=framed), corpus, "train")
    return PackedData(train, validation, corpus.description)


def _in_memory(blocks: Iterator[np.ndarray], corpus: Corpus, purpose: str) -> PackedBlocks:
    listed = list(blocks)
    if not listed:
        raise DataError(
            f"data.source: {corpus.description} leaves no text to {purpose} on; "
            "give more of it, or change data.validation_fraction"
        )
    return PackedBlocks(np.stack(listed))


@dataclass(frozen=True)
class PackedCollator:
    """Blocks to a batch: input_ids, position_ids and labels, each (batch, block_length) int64.

    position_ids restart at 0 after every end-of-text token: that is where the models of this package reset their
    state. The label of a document's first token is -100, since nothing before it says which document comes.
    """

    eos_token_id: int

    def __call__(self, features: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        input_ids = torch.stack([feature["input_ids"] for feature in features])
        first = torch.ones_like(input_ids, dtype=torch.bool)
        first[:, 1:] = input_ids[:, :-1] == self.eos_token_id
        position = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        start = torch.where(first, position, 0).cummax(dim=1).values
        return {
            "input_ids": input_ids,
            "position_ids": position - start,
            "labels": input_ids.masked_fill(first, IGNORED_LABEL),
        }


@dataclass(frozen=True)
class MaskedLMCollator:
    """Blocks to a batch for a masked language model: input_ids, position_ids, labels (batch, block_length) int64.

    Each token that is not special is chosen with probability `mlm_probability`; of those chosen, mask_replace_prob
    become the mask token, random_replace_prob a random one, and the rest stay as they are (BERT's 80 / 10 / 10, by
    transformers' `DataCollatorForLanguageModeling`). The labels are the chosen tokens, -100 elsewhere; at least one
    is chosen. position_ids are as in `PackedCollator`.

    The choice is a function of `seed` and the tokens alone, so a resumed run makes it again, in any worker process.
    Of all the batch's tokens, in training: shuffled differently, a block is masked anew in every epoch. Of a block's
    own tokens if `fixed`, for evaluation: the same in every evaluation and whatever the batch size.

    Raises DataError if the tokenizer has no mask token.
    """

    tokenizer: PreTrainedTokenizerBase
    mlm_probability: float
    mask_replace_prob: float = 0.8
    random_replace_prob: float = 0.1
    seed: int = 0
    fixed: bool = False

    def __post_init__(self) -> None:
        if self.tokenizer.mask_token_id is None:
            raise DataError(
                "the tokenizer has no mask token, which a masked language model needs; set its mask_token, or take "
                "another tokenizer"
            )

    def __call__(self, features: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = PackedCollator(end_token_id(self.tokenizer, framed=True))(features)
        blocks = batch["input_ids"].split(1 if self.fixed else len(features))
        input_ids, labels = zip(*(self._mask(block) for block in blocks), strict=True)
        return batch | {"input_ids": torch.cat(input_ids), "labels": torch.cat(labels)}

    def _mask(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        digest = hashlib.blake2b(input_ids.numpy().tobytes(), digest_size=7, salt=self.seed.to_bytes(8, "big"))
        generator = torch.Generator().manual_seed(int.from_bytes(digest.digest(), "big"))
        chooser = DataCollatorForLanguageModeling(
            self.tokenizer,
            mlm_probability=self.mlm_probability,
            mask_replace_prob=self.mask_replace_prob,
            random_replace_prob=self.random_replace_prob,
        )
        chooser.generator = generator
        special = torch.isin(input_ids, torch.tensor(self.tokenizer.all_special_ids))
        masked, labels = chooser.torch_mask_tokens(input_ids.clone(), special_tokens_mask=special)
        candidates = (~special).flatten().nonzero().flatten()
        if len(candidates) and bool((labels == IGNORED_LABEL).all()):  # a mean over no label at all would be NaN
            one = candidates[torch.randint(len(candidates), (1,), generator=generator)]
            labels.view(-1)[one] = input_ids.reshape(-1)[one]
            masked.view(-1)[one] = self.tokenizer.mask_token_id
        return masked, labels
