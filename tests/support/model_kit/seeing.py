"""Tiny random models that see, saved as they are published, with a tokenizer and a chat template.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers  # its classes are imported when they are used
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from diptych_protocol import Array, TokensPrompt

TILE = 32
"""Pixels of a tile's edge; 4 patches of 8 pixels by 4, in squares of 2 by 2: 4 tokens."""
LONGEST_EDGE = 64
"""An image is 4 tiles at most, and the small copy of it."""
MEAN, STD = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.5, 0.6, 0.7])
SPECIAL = (
    "<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
)  # fmt: skip
VOCABULARY = sorted(pre_tokenizers.ByteLevel.alphabet())
IMAGE_TOKEN = len(VOCABULARY) + SPECIAL.index("<image>")
VOCAB_SIZE = len(VOCABULARY) + len(SPECIAL)
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""In the manner of SmolVLM's own: the content of a message is a list of parts."""
TEXT: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "bos_token_id": len(VOCABULARY),
    "eos_token_id": len(VOCABULARY) + 1,
    "pad_token_id": 0,
}
VISION: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": TILE,
    "patch_size": 8,
    "initializer_range": 0.2,
}
WHOLE: dict[str, Any] = {"scale_factor": 2, "image_token_id": IMAGE_TOKEN, "pad_token_id": 0}
KINDS = {"idefics3": "Idefics3Config", "smolvlm": "SmolVLMConfig"}


def seeing_config(kind: str, *, tied: bool = False, **vision: Any) -> transformers.PretrainedConfig:
    """The configuration of a model of one family; `vision` replaces parts of `VISION`."""
    config: transformers.PretrainedConfig = getattr(transformers, KINDS[kind])(
        text_config=dict(TEXT),
        vision_config=VISION | vision,
        tie_word_embeddings=tied,
        **WHOLE,
    )
    return config


def save_seeing_model(folder: Path, config: transformers.PretrainedConfig, seed: int = 0) -> Any:
    """A random model whose norms and biases matter, saved under `folder`; returns transformers'
    object."""
    torch.manual_seed(seed)
    make: Any = transformers.AutoModelForImageTextToText.from_config
    model = make(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape))
            if "modality_projection" in name or "patch_embedding" in name:
                parameter.mul_(2.0)  # else what is seen would hardly change the logits
    model.save_pretrained(folder)
    save_processor(folder)
    return model


def save_processor(folder: Path) -> None:
    """Everything that turns a conversation with images into tokens and tiles."""
    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {
        "chat_template": TEMPLATE,
        "bos_token": "<|im_start|>",
        "eos_token": "<end_of_utterance>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    processor = {
        "size": {"longest_edge": LONGEST_EDGE},
        "max_image_size": {"longest_edge": TILE},
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.6, 0.7],
        "resample": 1,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


class Published:
    """A model on disk, and transformers' object of it."""

    def __init__(self, folder: Path) -> None:
        self.uri = str(folder)
        self._model = save_seeing_model(folder, seeing_config("smolvlm"))

    @torch.inference_mode()
    def worst_gap(self, prompt: TokensPrompt, answer: Sequence[int]) -> float:
        """How far any token of an answer is from being the most likely one, in logits."""
        tiles = [_normalised(f.data) for f in prompt.get("mm_features", []) if f.data is not None]
        given = prompt["prompt_token_ids"]
        inputs: dict[str, Any] = {"input_ids": torch.tensor([[*given, *answer]])}
        if tiles:
            inputs["pixel_values"] = torch.cat(tiles)[None]
        logits: Tensor = self._model(**inputs).logits[0, len(given) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        return float((logits.max(1).values - chosen).max())


def _normalised(data: Array) -> Tensor:
    tiles = torch.frombuffer(bytearray(data.data), dtype=torch.uint8).view(data.shape)
    return (tiles / 255 - MEAN.view(3, 1, 1)) / STD.view(3, 1, 1)
