"""The folders of Hugging Face's transformers: config.json, model.safetensors, tokenizer.json."""
import json
from pathlib import Path


def save_pretrained(model, folder, positions, end=None):
    """Write a whole model as a folder that transformers loads unchanged.

    positions: tokens per sequence; end: id of the token that ends a document. Raises ImportError without
    safetensors.
    """
    from safetensors.torch import save_file
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu",
                  torch_dtype="float32", max_position_embeddings=positions, bos_token_id=None,
                  eos_token_id=end, pad_token_id=None, **vars(model.config))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    weights = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # the package makes it readable by its owner alone
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)


def save_tokenizer(folder, tokenizer=None, end=None):
    """The run's tokenizer beside the model, as tokenizer.json and tokenizer_config.json.

    tokenizer: the file of --tokenizer, else bytes; end: id of the token that ends a document. Of token files
    alone (neither is known) nothing is written. Raises ImportError without the tokenizers package.
    """
    if end is None:
        return
    from tokenizers import Tokenizer
    found = Tokenizer.from_file(tokenizer) if tokenizer else byte_tokenizer()
    text = Path(tokenizer).read_text() if tokenizer else found.to_str()     # a file keeps its hash
    (Path(folder) / "tokenizer.json").write_text(text)
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps(dict(
        tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=False,
        eos_token=found.id_to_token(end))))


def named_end(tokenizer):
    """The token that ends a document, where a tokenizer_config.json beside this tokenizer.json names one."""
    beside = Path(tokenizer).with_name("tokenizer_config.json")
    named = json.loads(beside.read_text()).get("eos_token") if beside.exists() else None
    return named["content"] if isinstance(named, dict) else named


def byte_tokenizer():
    """A Tokenizer for which a text's tokens are its bytes in UTF-8.

    Its vocabulary writes a byte as the letter that GPT-2 gives it, but the zero byte, which ends a document,
    as itself: so a tokenizer_config.json can name it, and no text means it by that letter.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    letters = pre_tokenizers.ByteLevel.alphabet()
    others = iter([byte for byte in range(256) if chr(byte) not in letters])    # as chr(256), chr(257), ...
    vocab = {letter: ord(letter) if ord(letter) < 256 else next(others) for letter in sorted(letters)}
    vocab["\0"] = vocab.pop(chr(256))
    found = Tokenizer(models.BPE(vocab, merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    found.add_tokens([AddedToken("\0", normalized=False)])     # not special: --tokenizer finds it in a text
    return found
