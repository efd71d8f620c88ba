"""`--tokenizer` of train.py: a Hugging Face tokenizer.json, and the token that ends a document."""
from pathlib import Path

import torch

from train import Tokenizer

ENDS = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]"]   # what may end a document


def load(file, vocab):
    """The train.Tokenizer of this file; each text's tokens end with `end`. Raises ValueError."""
    try:
        from tokenizers import Tokenizer as HuggingFace
        tokenizer = HuggingFace.from_file(file)
    except ImportError:
        raise ValueError("--tokenizer needs the tokenizers package: pip install '.[hf]'")
    except Exception as error:                  # the package raises nothing narrower
        raise ValueError(f"--tokenizer {file}: {error}")
    tokenizer.encode_special_tokens = True      # a text that spells the end token goes on there
    tokenizer.no_truncation()                   # a file may ask for both, which would cut documents
    tokenizer.no_padding()
    known = [name for name in ENDS if tokenizer.token_to_id(name) is not None]
    if not known:
        raise ValueError(f"--tokenizer {file}: it has no {' or '.join(ENDS)} to end a document")
    size = 1 + max(tokenizer.get_vocab().values())
    if size > vocab:
        raise ValueError(f"this tokenizer needs --vocab {size}, not {vocab}")
    end = tokenizer.token_to_id(known[0])

    def encode(text):
        """Bytes that are no UTF-8 become replacement characters."""
        try:
            tokens = tokenizer.encode(text.decode(errors="replace"), add_special_tokens=False)
        except Exception as error:              # a word that it lacks, and no unknown token
            raise ValueError(f"--tokenizer {file}: {error}")
        return torch.tensor([*tokens.ids, end], dtype=torch.int32)

    return Tokenizer(encode, end, Path(file).read_bytes())
