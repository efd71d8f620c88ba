"""The folders of Hugging Face's transformers: config.json, model.safetensors, tokenizer.json."""
import json
from dataclasses import fields
from pathlib import Path

import torch

from model import Config
from plumbing.processes import BadInput


def read_config(folder):
    """The Config of a folder that transformers wrote.

    Raises ValueError on what this Llama does not have, OSError without a config.json.
    """
    found = json.loads((Path(folder) / "config.json").read_text())
    for rope in ("rope_scaling", "rope_parameters"):            # of transformers 4, 5
        found = {**found, **(found.get(rope) or {})}
    found = {name: value for name, value in found.items() if value is not None}
    wanted = dict(model_type="llama", hidden_act="silu", attention_bias=False, mlp_bias=False,
                  quantization_config=None, rope_type="default", type="default", partial_rotary_factor=1.0,
                  head_dim=found.get("hidden_size", 0) // found.get("num_attention_heads", 1))
    for name, value in wanted.items():
        unsaid = None if name == "model_type" else value
        if found.get(name, unsaid) != value:
            raise ValueError(f"{name} {found.get(name)} is not supported, only {value}")
    unsaid = dict(rope_theta=10000.0, rms_norm_eps=1e-6, tie_word_embeddings=False)
    unsaid["num_key_value_heads"] = found.get("num_attention_heads")
    found = {**unsaid, **found}
    for f in fields(Config):
        if f.name not in found:
            raise ValueError(f"config.json has no {f.name}")
    return Config(**{f.name: found[f.name] for f in fields(Config)})


def load_weights(model, folder):
    """Fill the tensors that this module holds from model.safetensors, or the files that its index names.

    No others are read. Raises ValueError on a missing tensor or another shape, ImportError without the
    safetensors package.
    """
    from safetensors import SafetensorError, safe_open
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"] if index.exists() else {}
    held = {}                                               # file: its parameters, by name
    for name, parameter in model.named_parameters():        # a tied head goes by the name of the embedding
        held.setdefault(folder / files.get(name, "model.safetensors"), {})[name] = parameter
    for file in sorted(held):
        try:
            with safe_open(file, "pt") as tensors:
                for name, parameter in held[file].items():
                    fill(parameter, name, tensors)
        except SafetensorError as error:
            raise ValueError(f"{file}: {error}")


def initial_weights(model, o):
    """Those of --init-from. Raises BadInput."""
    try:
        load_weights(model, o.init_from)
    except ImportError:
        raise BadInput("--init-from needs the safetensors package: pip install '.[hf]'")
    except ValueError as error:
        raise BadInput(f"--init-from {o.init_from}: {error}")


@torch.no_grad()
def fill(parameter, name, tensors):
    found, wanted = tensors.get_slice(name).get_shape(), list(parameter.shape)
    if found != wanted:
        raise ValueError(f"{name} has shape {found}, its config.json says {wanted}")
    parameter.copy_(tensors.get_tensor(name))


def save_pretrained(model, folder, positions, end=None):
    """Write a whole model as a folder that transformers loads unchanged.

    positions: tokens per sequence; end: id of the token that ends a document. Raises ImportError without
    safetensors.
    """
    from safetensors.torch import save_file
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    ends = dict(bos_token_id=None, eos_token_id=end, pad_token_id=None)
    config = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu",
                  attention_bias=False, mlp_bias=False, torch_dtype="float32",
                  max_position_embeddings=positions, **ends, **vars(model.config))
    for name, content in (("config.json", config), ("generation_config.json", ends)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    mode = (folder / "config.json").stat().st_mode
    (folder / "model.safetensors").chmod(mode)      # the package makes it readable by its owner alone


def save_tokenizer(folder, tokenizer=None, end=None):
    """The run's tokenizer beside the model, as tokenizer.json and tokenizer_config.json.

    tokenizer: the file of --tokenizer, else bytes; end: id of the token that ends a document. Of token files
    alone (neither is known) nothing is written.
    """
    if end is None:
        return
    name, content = "\0", json.dumps(byte_tokenizer())
    if tokenizer:
        from tokenizers import Tokenizer
        name, content = Tokenizer.from_file(tokenizer).id_to_token(end), Path(tokenizer).read_text()
    (Path(folder) / "tokenizer.json").write_text(content)
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps(dict(
        tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=False, eos_token=name)))


def named_end(tokenizer):
    """The token that ends a document, where a tokenizer_config.json beside this tokenizer.json names one."""
    beside = Path(tokenizer).with_name("tokenizer_config.json")
    named = json.loads(beside.read_text()).get("eos_token") if beside.exists() else None
    return named["content"] if isinstance(named, dict) else named


def byte_tokenizer():
    """A tokenizer.json, as a dict, for which a text's tokens are its bytes in UTF-8.

    Its vocabulary writes a byte as the letter that GPT-2 gives it, but the zero byte, which ends a document,
    as itself: so a tokenizer_config.json can name it, and no text means it by that letter.
    """
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]       # these stand for themselves
    others = [byte for byte in range(256) if byte not in plain]         # the others come after 255
    vocab = {chr(byte): byte for byte in plain}
    vocab.update({chr(256 + i): byte for i, byte in enumerate(others)})
    vocab["\0"] = vocab.pop(chr(256))
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=False)
    bpe = dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None,
               end_of_word_suffix=None, fuse_unk=False, vocab=vocab, merges=[])
    zero = dict(id=0, content="\0", single_word=False, lstrip=False, rstrip=False, normalized=False,
                special=False)      # special ones are no tokens where --tokenizer finds them in a text
    return dict(version="1.0", truncation=None, padding=None, added_tokens=[zero], normalizer=None,
                pre_tokenizer=level, post_processor=None, decoder=level, model=bpe)
