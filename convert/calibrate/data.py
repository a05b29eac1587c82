"""What a model is calibrated on: windows of tokens from a text, and others of the same text to judge the result by."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferencex.convert.calibrate.builtin_text import BuiltinText
from inferencex.convert.calibrate.documents import Reading, TextSource
from inferencex.convert.calibrate.hub_dataset import HubDataset
from inferencex.convert.calibrate.local_text import LocalText, is_local
from inferencex.convert.calibrate.self_text import Sampler, random_windows, sampled_windows
from inferencex.convert.calibrate.token_stream import text_prefix, token_stream
from inferencex.convert.calibrate.windows import choose_windows
from inferencex.convert.side_files import side_file_folder
from inferencex.formats.errors import OptionError, SourceError
from inferencex.runtime.text import ChatTemplate, Tokenizer

BUILTIN, SELF, RANDOM = "builtin", "self", "random"
MIN_LENGTH, MAX_LENGTH, MAX_SAMPLES = 32, 1 << 16, 1 << 20
HELD_OUT_SAMPLES = 16
_MAX_SEED = 1 << 63
_DATE_OF_CHATS = datetime(2025, 1, 1)

# Characters. A section of a text is a few windows long: most windows then lie within one, and there are many sections.
_SECTION_PER_TOKEN, _SHORTEST_SECTION = 16, 1024


@dataclass(frozen=True)
class CalibrationOptions:
    """What a user asks for; checked when made, before any work.

    source:    `builtin`, `self`, `random`, files, or `NAME[:CONFIG][:SPLIT]`; a `#COLUMN` may follow the last two
    samples:   windows to calibrate on
    length:    tokens in a window
    held_out:  windows to keep for judging the result; at least one is, and fewer when the text has no more
    seed:      of all that is drawn
    """

    source: str = BUILTIN
    samples: int = 128
    length: int = 512
    held_out: int = HELD_OUT_SAMPLES
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises OptionError for a number out of range, a file that is not there, a package that is missing."""
        if not 1 <= self.samples <= MAX_SAMPLES:
            raise OptionError(f"--calibration-samples {self.samples}: expected a number from 1 to {MAX_SAMPLES}")
        if not MIN_LENGTH <= self.length <= MAX_LENGTH:
            raise OptionError(
                f"--calibration-length {self.length}: expected a number of tokens from {MIN_LENGTH} to {MAX_LENGTH}"
            )
        if self.held_out < 1:
            raise OptionError(f"held_out is {self.held_out}, expected at least one window")
        if not 0 <= self.seed < _MAX_SEED:
            raise OptionError(f"--calibration-seed {self.seed}: expected a number from 0 to {_MAX_SEED - 1}")
        self.text_source()

    def text_source(self) -> TextSource | None:
        """Return where the text is, None when it is drawn rather than read. Raises OptionError when it is nowhere."""
        if self.source in (SELF, RANDOM):
            return None
        if self.source == BUILTIN:
            return BuiltinText()
        name, column = self.source, None
        if "#" in name and not Path(name).exists():
            name, column = name.rsplit("#", 1)
        if not name.strip() or column == "":
            raise OptionError(
                f"--calibration {self.source!r}: expected {BUILTIN}, {SELF}, a path, or NAME[:CONFIG][:SPLIT] of a "
                "dataset on the hub; #COLUMN may follow"
            )
        return LocalText(name, column) if is_local(name) else HubDataset(name, column)


def fitting_length(options: CalibrationOptions | None, positions: int) -> CalibrationOptions | None:
    """Return options whose windows a model of so many positions can read: the default length gives way.

    Raises OptionError for another length that is too long.
    """
    if options is None or options.length <= positions:
        return options
    if options.length == CalibrationOptions.length and positions >= MIN_LENGTH:
        return replace(options, length=positions)
    if positions < MIN_LENGTH:
        raise OptionError(
            f"the bundle will have {positions} positions, and calibration takes windows of at least {MIN_LENGTH} "
            "tokens; give a larger --max-model-len, or a method without calibration, such as rtn-int4"
        )
    raise OptionError(
        f"--calibration-length {options.length} is more than the {positions} positions that the bundle will have; give "
        f"at most {positions}, or a larger --max-model-len"
    )


@dataclass(frozen=True)
class CalibrationSet:
    """Windows of a text.

    token_ids:  int64 [samples, length]  to calibrate on
    held_out:   int64 [windows, length]  of the same text, with no token of `token_ids` among them; at least one
    source:     what `bundle.json` records: name and kind of the text, seed, samples, length, sha256 of the ids
    """

    token_ids: NDArray[np.int64]
    held_out: NDArray[np.int64]
    source: dict[str, Any]


def load_calibration(
    options: CalibrationOptions,
    files: Mapping[str, Path],
    *,
    vocab_size: int,
    sampler: Sampler | None = None,
) -> CalibrationSet:
    """Read, encode and draw what `options` ask for; the same arguments give the same windows.

    files:       side files of the checkpoint by name, of which tokenizer and chat template are read
    vocab_size:  rows of the model's token embedding
    sampler:     continues texts with the model; needed for `self`

    Every window begins with what the tokenizer puts in front of a text (for many models a beginning-of-text token), as
    every prompt does when the model runs. Raises OptionError when the text is too short, empty or unreadable, and
    SourceError when the tokenizer is missing or is not the model's.
    """
    tokenizer, template = _text_side(files)
    prefix = [] if tokenizer is None else text_prefix(tokenizer)
    source = options.text_source()
    facts: dict[str, Any] = {}
    if source is None:
        windows = _drawn(options, tokenizer, prefix, vocab_size, sampler)
        token_ids, held_out = windows[: options.samples], windows[options.samples :]
        facts["kind"] = options.source
    else:
        if tokenizer is None or template is None:
            raise SourceError(
                f"--calibration {options.source}: the checkpoint has no tokenizer.json to read text with; "
                f"give --calibration {SELF} or {RANDOM}, which need none"
            )
        token_ids, held_out = _read(options, source, tokenizer, template, prefix)
        facts |= {"kind": source.kind, **source.facts()}
    beyond = int(max(token_ids.max(), held_out.max()))
    if beyond >= vocab_size:
        raise SourceError(
            f"the tokenizer gives the id {beyond}, and the model knows {vocab_size} tokens; tokenizer.json is not this "
            "model's, or the text writes out special tokens that the model lacks"
        )
    return CalibrationSet(
        token_ids,
        held_out,
        {
            "name": options.source if source is None else source.name,
            **facts,
            "seed": options.seed,
            "samples": options.samples,
            "length": options.length,
            "held_out": len(held_out),
            "prefix": prefix,
            "sha256": hashlib.sha256(token_ids.astype("<i8").tobytes()).hexdigest(),
        },
    )


def _text_side(files: Mapping[str, Path]) -> tuple[Tokenizer, ChatTemplate] | tuple[None, None]:
    """Load tokenizer and chat template, if there are any; a template that asks for the date is told always the same."""
    if "tokenizer.json" not in files:
        return None, None
    with side_file_folder(files) as folder:
        tokenizer = Tokenizer.load(folder)
        return tokenizer, ChatTemplate.load(folder, tokenizer, now=lambda: _DATE_OF_CHATS)


def _read(
    options: CalibrationOptions,
    source: TextSource,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    prefix: Sequence[int],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return windows of the text: to calibrate on, and held out."""

    def render(messages: Sequence[Mapping[str, Any]]) -> str:
        if not template:
            raise OptionError(
                f"--calibration {options.source}: holds chats, and the model has no chat template to write them with; "
                "give plain text, for example another column: SOURCE#COLUMN"
            )
        return template.render(messages, add_generation_prompt=False)

    length = options.length - len(prefix)
    windows = options.samples + options.held_out
    reading = Reading(render, options.seed, section=max(_SHORTEST_SECTION, _SECTION_PER_TOKEN * options.length))
    stream = token_stream(source, tokenizer, reading, needed=windows * length, windows=windows)
    if len(stream) < (options.samples + 1) * length:
        _refuse(options, len(stream), len(prefix))
    chosen = choose_windows(len(stream), length, options.samples, options.held_out, options.seed)

    def cut(starts: NDArray[np.int64]) -> NDArray[np.int64]:
        text = stream[starts[:, None] + np.arange(length)]
        return np.concatenate([np.tile(np.asarray(prefix, dtype=np.int64), (len(starts), 1)), text], axis=1)

    return cut(chosen.calibration), cut(chosen.held_out)


def _refuse(options: CalibrationOptions, found: int, prefix: int) -> None:
    """Say how much text is missing, and which samples or length it would be enough for."""
    if found == 0:
        raise OptionError(f"--calibration {options.source}: holds no text; give another source")
    needed = (options.samples + 1) * (options.length - prefix)
    samples = found // (options.length - prefix) - 1
    length = found // (options.samples + 1) + prefix
    ways = []
    if samples >= 1:
        ways.append(f"--calibration-samples to {samples}")
    if length >= MIN_LENGTH:
        ways.append(f"--calibration-length to {length}")
    advice = f"lower {' or '.join(ways)}, or give a longer text" if ways else "give a longer text"
    raise OptionError(
        f"--calibration {options.source}: found {found:,} tokens, need {needed:,} for {options.samples} samples of "
        f"{options.length} and one held out; {advice}"
    )


def _drawn(
    options: CalibrationOptions,
    tokenizer: Tokenizer | None,
    prefix: Sequence[int],
    vocab_size: int,
    sampler: Sampler | None,
) -> NDArray[np.int64]:
    """Return windows that need no text, int64 `[samples + held_out, length]`."""
    count = options.samples + options.held_out
    ordinary = np.arange(vocab_size)
    if tokenizer is not None:
        unusual = {None, *tokenizer.special_contents}
        ordinary = np.asarray([token for token in ordinary.tolist() if tokenizer.id_to_token(token) not in unusual])
    if options.source == RANDOM:
        return random_windows(prefix, ordinary, count, options.length, options.seed)
    if sampler is None:
        raise OptionError(f"--calibration {SELF}: needs a model that can be sampled from, and none was given")
    return sampled_windows(sampler, prefix, ordinary, count, options.length, options.seed)
