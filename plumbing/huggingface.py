"""The folders of Hugging Face's transformers: config.json, model.safetensors, tokenizer.json."""
import json
from dataclasses import fields
from pathlib import Path

from model import Config
from plumbing.processes import BadInput


def read_config(folder):
    """The Config of a folder that transformers wrote.

    Raises ValueError on what this Llama does not have, OSError without a config.json.
    """
    found = json.loads((Path(folder) / "config.json").read_text())
    for rope in ("rope_scaling", "rope_parameters"):            # of transformers 4, 5
        found = {**found, **(found.get(rope) or {})}
    found = {"model_type": None, **{name: value for name, value in found.items() if value is not None}}
    wanted = dict(model_type="llama", hidden_act="silu", attention_bias=False, mlp_bias=False,
                  quantization_config=None, rope_type="default", type="default", partial_rotary_factor=1.0,
                  head_dim=found.get("hidden_size", 0) // (found.get("num_attention_heads") or 1))
    for name, value in wanted.items():
        if found.get(name, value) != value:
            raise ValueError(f"{name} {found[name]} is not supported, only {value}")
    unsaid = dict(rope_theta=10000.0, rms_norm_eps=1e-6, tie_word_embeddings=False,
                  num_key_value_heads=found.get("num_attention_heads"))
    found = {**unsaid, **found}
    names = [f.name for f in fields(Config)]
    if missing := [name for name in names if name not in found]:
        raise ValueError(f"config.json has no {missing[0]}")
    return Config(**{name: found[name] for name in names})


def load_weights(model, folder):
    """Fill the tensors that this module holds from model.safetensors, or the files that its index names.

    No other tensors are read. Raises BadInput on a missing tensor, another shape or a damaged file, OSError
    on a missing file, ImportError without safetensors.
    """
    from safetensors import SafetensorError, safe_open
    index = Path(folder, "model.safetensors.index.json")
    try:
        files = json.loads(index.read_text())["weight_map"] if index.exists() else {}
        for name, parameter in model.named_parameters():    # a tied head goes by the name of the embedding
            with safe_open(Path(folder, files.get(name, "model.safetensors")), "pt") as tensors:
                found = tensors.get_tensor(name)
            if found.shape != parameter.shape:
                raise ValueError(f"{name} has shape {[*found.shape]}, by config.json {[*parameter.shape]}")
            parameter.data.copy_(found)
    except (SafetensorError, ValueError, KeyError) as error:
        raise BadInput(f"--init-from {folder}: {error}")


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
