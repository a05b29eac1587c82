"""Token ids to text, as they come: what streaming answers are made of."""

from __future__ import annotations

from collections.abc import Sequence

from inferencex.runtime.text.cleanup import StreamingCleanUp
from inferencex.runtime.text.decoding import build_stages
from inferencex.runtime.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns the ids of one text into pieces; joined, with the flush, they equal `Tokenizer.decode` of all ids.

    No piece ends inside a character. Bytes that can still become one are held back; bytes that cannot are U+FFFD
    at once. The cost of a token does not grow with the length of the text. With `prompt_ids` the text continues
    that of the prompt: the space that tokenizers drop at the start of a text is then kept.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_contents if skip_special_tokens else frozenset()
        self._stages = build_stages(tokenizer.decoder_spec)
        self._clean_up = StreamingCleanUp() if tokenizer.cleans_up_spaces else None
        self._pieces: list[str] = []
        for token_id in reversed(prompt_ids):
            token = tokenizer.id_to_token(token_id)
            if token is not None and token not in self._skipped:
                for stage in self._stages:
                    stage.after(token)
                break

    def push(self, token_id: int) -> str:
        """Take the next id and return the text it completes, often empty. An id that names no token adds nothing."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token in self._skipped:
            return ""
        pieces = [token]
        for stage in self._stages:
            # Nearly always there is one piece.
            pieces = (
                stage.push(pieces[0]) if len(pieces) == 1 else [out for piece in pieces for out in stage.push(piece)]
            )
        text = pieces[0] if len(pieces) == 1 else "".join(pieces)
        if self._clean_up is not None:
            text = self._clean_up.push(text)
        if text:
            self._pieces.append(text)
        return text

    def flush(self) -> str:
        """Return the text that was held back; nothing is pushed after that."""
        pieces: list[str] = []
        for stage in self._stages:
            pieces = [piece for token in pieces for piece in stage.push(token)]
            pieces += stage.end()
        text = "".join(pieces)
        if self._clean_up is not None:
            text = self._clean_up.push(text) + self._clean_up.flush()
        if text:
            self._pieces.append(text)
        return text

    @property
    def text(self) -> str:
        """All the text returned so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""
