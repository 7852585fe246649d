"""/tokenize and /detokenize, as vLLM has them."""

from pdserve.errors import InvalidField, TooLong
from pdserve.rpc.v1 import inference_pb2
from router.openai.call import read_prompt_options
from router.openai.chat import read_messages
from router.openai.compatibility import UnknownFields, check_rest
from router.openai.fields import Fields, as_ids, brief
from router.openai.json_parts import Parts
from router.openai.logprobs import TokenTexts
from router.openai.sampling import shown_as
from router.prompt import RequestMaker
from router.validation import check_model


async def tokenize(
    fields: Fields, maker: RequestMaker, texts: TokenTexts, unknown: UnknownFields
) -> dict[str, object]:
    """Tokenizes a text or a chat; encode the answer with `json_parts`.

    Raises:
        PdserveError: the body is refused.
    """
    wire = inference_pb2.GenerateRequest(model=fields.text("model") or "")
    text = fields.text("prompt")
    if text is not None and fields.has("messages"):
        raise InvalidField("messages", "both", "absent beside prompt")
    if text is not None:
        wire.text = text
    else:
        wire.chat.messages.extend(read_messages(fields, unknown))
    options = read_prompt_options(fields, is_chat=text is None)
    wants_texts = fields.flag("return_token_strs") or False
    check_rest(fields, unknown)
    try:
        token_ids = await maker.tokenize(wire, options)
    except InvalidField as error:
        raise shown_as(error, {}) from error
    return {
        "count": len(token_ids),
        "max_model_len": maker.limits.max_model_len,
        "tokens": list(token_ids),
        "token_strs": Parts(token_ids, texts.text_of) if wants_texts else None,
    }


async def detokenize(
    fields: Fields, maker: RequestMaker, unknown: UnknownFields
) -> dict[str, object]:
    """Turns token ids into text, special tokens included.

    Raises:
        PdserveError: the body is refused.
    """
    check_model(fields.text("model") or "", maker.limits)
    limit = maker.limits.max_model_len
    values = fields.raw("tokens")
    if not isinstance(values, list):
        raise InvalidField("tokens", brief(values), "a list of token ids")
    if len(values) > limit:
        raise TooLong("tokens", len(values), f"at most {limit} tokens")
    token_ids = as_ids("tokens", values)
    check_rest(fields, unknown)
    largest = max(token_ids, default=0)
    if largest >= maker.limits.vocab_size:
        vocabulary = f"below the vocabulary size {maker.limits.vocab_size}"
        raise InvalidField("tokens", largest, vocabulary)
    return {"prompt": await maker.tokenizer.decode(token_ids, skip_special_tokens=False)}
