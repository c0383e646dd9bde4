"""The model as the front end knows it: its name, its texts, its bounds, and how inputs become tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from colibri.v1 import experts_pb2, inference_pb2 as pb
from engine_c.structs import ModelInfo
from service.artifact import Artifact
from service.chat import ChatError, ChatTemplate
from service.config import ConfigError
from service.detokenise import decode
from service.faults import InvalidField
from service.params import Bounds, check_tokens
from service.tokenizer import Tokenizer, TokenizerError

HasInput = pb.GenerateRequest | pb.ScoreRequest | pb.TokenizeRequest | experts_pb2.RouteRequest


@dataclass(frozen=True, slots=True)
class Prompt:
    """An input as tokens; `field` is the request's field it came in, `text` the rendered chat or empty."""

    tokens: list[int]
    field: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Immutable; for any thread."""

    name: str
    artifact: Artifact
    info: ModelInfo
    bounds: Bounds
    tokenizer: Tokenizer | None = None
    template: ChatTemplate | None = field(default=None, repr=False)

    def read_prompt(self, message: HasInput, *, add_special_tokens: bool = True) -> Prompt:
        """The tokens of a request's input. Raises InvalidField."""
        kind = message.WhichOneof("input")
        if kind == "tokens":
            return self._read_tokens(message.tokens)  # type: ignore[union-attr]
        if kind == "text":
            return self._read_text(message.text, add_special_tokens=add_special_tokens)
        if kind == "chat":
            return self._read_chat(message.chat)  # type: ignore[union-attr]
        choices = ", ".join(field.name for field in message.DESCRIPTOR.oneofs_by_name["input"].fields)
        raise InvalidField("input", f"is missing; set one of {choices}")

    def detokenise(self, tokens: Sequence[int], *, skip_special: bool) -> str:
        """The text of tokens. Raises InvalidField."""
        if len(tokens) > self.bounds.chars:
            raise InvalidField("token_ids", f"has {len(tokens)} tokens; at most {self.bounds.chars} are decoded at a time")
        check_tokens("token_ids", tokens, vocab=self.bounds.vocab)
        return decode(self._need_tokenizer("token_ids").bytes_of, tokens, skip_special=skip_special)

    def token_bytes(self, token: int) -> bytes:
        """A token's own bytes; none without a tokenizer."""
        return b"" if self.tokenizer is None else self.tokenizer.bytes_of(token)

    def describe(self) -> pb.Model:
        """As GetModel tells it."""
        generation = self.bounds.generation
        return pb.Model(
            name=self.name,
            max_context=self.bounds.max_context,
            vocab_size=self.bounds.vocab,
            layers=self.info.layers,
            hidden_size=self.info.hidden,
            experts=self.info.experts,
            experts_per_token=self.info.top_k,
            quantisation=self.artifact.quantisation,
            file_bytes=self.info.file_bytes,
            has_tokenizer=self.tokenizer is not None,
            has_chat_template=self.template is not None,
            default_max_tokens=self.bounds.default_max_tokens,
            generation=pb.GenerationDefaults(
                temperature=generation.temperature, top_p=generation.top_p, top_k=generation.top_k, eos_token_ids=generation.eos_token_ids
            ),
            licence=self.artifact.licence,
        )

    def _check_length(self, name: str, chars: int) -> None:
        if chars > self.bounds.chars:
            raise InvalidField(name, f"has {chars} characters; a prompt for this model can have {self.bounds.chars}")

    def _need_tokenizer(self, name: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidField(name, "this model has no tokenizer; give token ids and read token ids")
        return self.tokenizer

    def _read_tokens(self, message: pb.TokenIds) -> Prompt:
        if not message.ids:
            raise InvalidField("tokens.ids", "is empty; give at least one token")
        if len(message.ids) > self.bounds.max_context:
            raise InvalidField("tokens.ids", f"has {len(message.ids)} tokens; the context holds {self.bounds.max_context}")
        check_tokens("tokens.ids", message.ids, vocab=self.bounds.vocab)
        return Prompt(list(message.ids), "tokens.ids")

    def _read_text(self, text: str, *, add_special_tokens: bool) -> Prompt:
        first = self.bounds.generation.first_token if add_special_tokens else None
        tokens = self._encode("text", text, first=first, add_special_tokens=add_special_tokens)
        if not tokens:
            raise InvalidField("text", "has no tokens; give at least one character that the vocabulary knows")
        return Prompt(tokens, "text")

    def _read_chat(self, chat: pb.Chat) -> Prompt:
        if self.template is None:
            raise InvalidField("chat", "this model has no chat template; give text")
        if not chat.messages:
            raise InvalidField("chat.messages", "is empty; give at least one message")
        if len(chat.messages) > self.bounds.max_context:
            raise InvalidField("chat.messages", f"has {len(chat.messages)} entries; the context holds {self.bounds.max_context} tokens")
        for index, message in enumerate(chat.messages):
            if not message.role:
                raise InvalidField(f"chat.messages[{index}].role", "is empty; say who speaks, such as user")
        self._check_length("chat", sum(len(message.role) + len(message.content) for message in chat.messages))
        header = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
        try:
            turns = [{"role": message.role, "content": message.content} for message in chat.messages]
            text = self.template.render(turns, add_generation_prompt=header)
        except ChatError as error:
            raise InvalidField("chat.messages", str(error)) from error
        tokens = self._encode("chat", text, first=self.bounds.generation.first_token, add_special_tokens=False)
        if not tokens:
            raise InvalidField("chat", "has no tokens once rendered")
        return Prompt(tokens, "chat", text)

    def _encode(self, name: str, text: str, *, first: int | None, add_special_tokens: bool) -> list[int]:
        tokenizer = self._need_tokenizer(name)
        self._check_length(name, len(text))
        try:
            tokens = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except TokenizerError as error:
            raise InvalidField(name, str(error)) from error
        if first is not None:
            tokens = begin_once(tokens, first)
        check_tokens(name, tokens, vocab=self.bounds.vocab)
        return tokens


def begin_once(tokens: list[int], first: int) -> list[int]:
    """Tokens that begin with `first` exactly once: the tokenizer, the chat template and the caller may each have put it there, or none."""
    rest = next((index for index, token in enumerate(tokens) if token != first), len(tokens))
    return [first, *tokens[rest:]]


def load_texts(artifact: Artifact) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """A model's tokenizer and chat template, which takes a while. Raises ConfigError if they are unusable. Any thread."""
    tokenizer = template = None
    try:
        if artifact.tokenizer is not None:
            tokenizer = Tokenizer(artifact.tokenizer)
        if tokenizer is not None and artifact.chat_template is not None:
            template = _make_template(artifact, tokenizer)
    except (TokenizerError, ChatError) as error:
        raise ConfigError(f"{artifact.path}: {error}") from error
    return tokenizer, template


def make_served(
    artifact: Artifact,
    info: ModelInfo,
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
    *,
    name: str,
    kv_tokens: int,
    default_max_tokens: int,
) -> ServedModel:
    """Puts a model together. `kv_tokens` is what the KV memory holds."""
    context = min(info.max_context, kv_tokens)
    bounds = Bounds(info.vocab, context, min(default_max_tokens, context), artifact.generation)
    return ServedModel(name or artifact.name, artifact, info, bounds, tokenizer, template)


def _make_template(artifact: Artifact, tokenizer: Tokenizer) -> ChatTemplate:
    bos, ends = artifact.generation.bos_token_id, artifact.generation.eos_token_ids
    return ChatTemplate(
        artifact.chat_template or "",
        bos_token="" if bos is None else tokenizer.piece(bos),
        eos_token=tokenizer.piece(ends[0]) if ends else "",
    )
