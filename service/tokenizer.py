"""Text to tokens and back, by the tokenizer.json that a model's container carries."""

from __future__ import annotations

import json

from service.detokenise import Detokeniser, TokenBytes, UnsupportedDecoder, decode, read_rules


class TokenizerError(ValueError):
    """The tokenizer file is unusable, or refused a text; says why."""


class Tokenizer:
    """Thread-safe: encoding changes nothing, and the table of token bytes only fills up."""

    def __init__(self, blob: bytes) -> None:
        from tokenizers import Tokenizer as HfTokenizer  # here, since it takes a while to import, and not every model has one

        try:
            self._hf = HfTokenizer.from_str(blob.decode())
            # The library's own copy: reading the whole file a second time would take a third as long as all else here.
            rules = read_rules(json.loads(self._hf.decoder.__getstate__()) if self._hf.decoder is not None else None)
        except UnsupportedDecoder as error:
            raise TokenizerError(str(error)) from error
        except Exception as error:  # the tokenizers library raises bare Exception
            raise TokenizerError(f"tokenizer.json cannot be read: {error}") from error
        self._hf.no_truncation()
        self._hf.no_padding()
        added = self._hf.get_added_tokens_decoder()
        self.bytes_of = TokenBytes(self._hf.id_to_token, rules, special=frozenset(i for i, token in added.items() if token.special))
        self.vocab_size = self._hf.get_vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; characters the vocabulary cannot express at all are left out. Raises TokenizerError."""
        try:  # this form of the call releases the GIL and keeps no offsets; encode() holds up every other thread
            return self._hf.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except Exception as error:
            raise TokenizerError(f"the tokenizer cannot encode this text: {error}") from error

    def decode(self, tokens: list[int], *, skip_special: bool = True) -> str:
        """The text of tokens."""
        return decode(self.bytes_of, tokens, skip_special=skip_special)

    def piece(self, token: int) -> str:
        """A token as the vocabulary writes it; empty for an id it does not have."""
        return self._hf.id_to_token(token) or ""

    def continuation(self, *, skip_special: bool = True) -> Detokeniser:
        """For an answer that follows a prompt, token by token."""
        return Detokeniser(self.bytes_of, skip_special=skip_special, continues=True)
