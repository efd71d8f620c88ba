"""The folders of Hugging Face's transformers: config.json, model.safetensors, tokenizer.json."""
import json
from pathlib import Path


def save_pretrained(model, folder, positions, end=None):
    """Write a whole model as a folder that transformers loads unchanged.

    positions: tokens per sequence. end: id of the token that ends a document. Raises ImportError
    without safetensors.
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


def save_tokenizer(folder, tokenizer, end):
    """The run's tokenizer beside the model, as tokenizer.json and tokenizer_config.json.

    tokenizer: the file of --tokenizer. end: id of the token that ends a document. Raises
    ImportError without tokenizers.
    """
    from tokenizers import Tokenizer
    name = Tokenizer.from_file(tokenizer).id_to_token(end)
    (folder / "tokenizer.json").write_bytes(Path(tokenizer).read_bytes())
    config = dict(tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=False,
                  eos_token=name)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def named_end(tokenizer):
    """The token that ends a document, or None.

    A tokenizer_config.json beside this tokenizer.json may name it.
    """
    beside = Path(tokenizer).with_name("tokenizer_config.json")
    if not beside.exists():
        return None
    named = json.loads(beside.read_text()).get("eos_token")
    if isinstance(named, dict):             # a token with its properties
        return named["content"]
    return named
