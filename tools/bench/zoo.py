"""Public models at full or tiny size, built from their configs, with random inputs.

`build(suite, name, scale, ...)` gives (model, args, kwargs). Suites: hf (transformers), timm, tv (torchvision).
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2] / "packages" / "primtorch" / "tests"))

from torchvision_import import import_torchvision

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

# Public models with the batches (and lengths of sequences) that they are trained with on one large GPU.
FULL_SIZE = (
    "hf/BertForMaskedLM,16,512", "hf/GPT2ForSequenceClassification,8,1024", "hf/DistillGPT2,32,512",
    "hf/DebertaV2ForMaskedLM,8,512", "hf/AlbertForMaskedLM,8,512", "hf/T5Small,8,1024", "hf/OPTForCausalLM,4,1024",
    "hf/DistilBertForMaskedLM,64,128", "hf/RobertaForQuestionAnswering,32,510", "hf/ElectraForCausalLM,64,512",
    "hf/BartForCausalLM,8,1024", "hf/XLNetLMHeadModel,16,512", "hf/MobileBertForMaskedLM,64,128",
    "timm/mobilenetv3_large_100,256", "timm/tf_efficientnet_b0,128", "timm/vit_base_patch16_224,128",
    "timm/swin_base_patch4_window7_224,64", "timm/convnext_base,64", "timm/mixer_b16_224,128",
    "timm/beit_base_patch16_224,64", "timm/xcit_large_24_p8_224,8", "timm/regnety_002,512", "timm/nfnet_l0,64",
    "tv/resnet50,128", "tv/resnet18,128", "tv/densenet121,64", "tv/vgg16,64",
)  # fmt: skip

# Names that are not the class's own: (class, changes of its config).
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "T5Small": ("T5ForConditionalGeneration", {}),
    "AllenaiLongformerBase": ("LongformerForMaskedLM", {}),
    "CamemBert": ("CamembertForMaskedLM", {}),
    "DistillGPT2": ("GPT2LMHeadModel", {"n_layer": 6}),
}

# Config fields of a tiny model, set where a config has them.
TINY: dict[str, int] = {
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "dim": 64, "embedding_size": 32,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_decoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "intermediate_size": 128, "d_ff": 128, "d_inner": 128, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
    "hidden_dim": 128, "vocab_size": 1000, "d_kv": 16, "rotary_dim": 8, "ffn_dim": 128,
    "word_embed_proj_dim": 64,
}  # fmt: skip
# More fields, for the classes whose name begins so.
TINY_BY_CLASS: dict[str, dict[str, Any]] = {
    "MobileBert": {"intra_bottleneck_size": 64, "true_hidden_size": 64, "embedding_size": 32},
    "GPTNeo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
    "Longformer": {"attention_window": [16, 16]},
    "Electra": {"embedding_size": 64},
}

# Image models whose windows or grids do not divide every side: the smallest one that they take.
SMALLEST_SIDE: dict[str, int] = {
    "swin_base_patch4_window7_224": 224, "nest_base_jx": 224, "eca_botnext26ts_256": 128, "sebotnet33ts_256": 128,
    "adv_inception_v3": 75, "mobilevit_s": 128, "twins_pcpvt_base": 128,
}  # fmt: skip


def build(
    suite: str,
    name: str,
    *,
    scale: str = "tiny",
    train: bool,
    batch: int = 2,
    length: int = 64,
    side: int | None = None,
) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A model in train or eval mode with inputs.

    `length`: tokens of a sequence (transformers only). `side`: pixels of an image's side where the model takes any
    (its smallest possible one where it does not); None: what it was made for.
    """
    import_torchvision()
    if suite == "hf":
        model, args, kwargs = _transformer(name, scale, train, batch, length)
    elif suite == "timm":
        model, args, kwargs = _image_model(name, batch, side)
    elif suite == "tv":
        import torchvision

        model = getattr(torchvision.models, name)()
        args, kwargs = (torch.randn(batch, 3, side or 224, side or 224),), {}
    else:
        raise SystemExit(f"no suite {suite!r}: hf, timm or tv")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # values are compared between runs
    return model.train(train), args, kwargs


def _image_model(name: str, batch: int, side: int | None) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    import timm

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names of the list that are older than timm's
        if side is None:
            model = timm.create_model(name, pretrained=False)
            return model, (torch.randn(batch, *model.default_cfg["input_size"]),), {}
        side = max(side, SMALLEST_SIDE.get(name, 0))
        try:
            model = timm.create_model(name, pretrained=False, img_size=side)
        except TypeError:  # convolutional: any side
            model = timm.create_model(name, pretrained=False)
    return model, (torch.randn(batch, 3, side, side),), {}


def _transformer(
    name: str, scale: str, train: bool, batch: int, length: int
) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    import transformers

    class_name, changes = CLASSES.get(name, (name, {}))
    cls = getattr(transformers, class_name)
    config = cls.config_class()
    if scale == "tiny":
        for key, value in TINY.items():
            current = getattr(config, key, None)
            if isinstance(current, int) and not isinstance(current, bool):
                setattr(config, key, value)
        for prefix, fields in TINY_BY_CLASS.items():
            if class_name.startswith(prefix):
                changes = changes | fields
    for key, value in changes.items():
        setattr(config, key, value)
    for key, value in list(vars(config).items()):
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    for key in ("pad_token_id", "eos_token_id", "bos_token_id", "decoder_start_token_id"):
        token = getattr(config, key, None)
        if token is None or (isinstance(token, int) and token >= config.vocab_size):
            setattr(config, key, 1)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if class_name.endswith("CausalLM") and hasattr(config, "is_decoder"):
        config.is_decoder = True
    model = cls(config)
    ids = torch.randint(3, config.vocab_size, (batch, length))
    if class_name.endswith(("SequenceClassification", "QuestionAnswering")) or "Bart" in class_name:
        ids[:, -1] = config.eos_token_id
    kwargs = {"input_ids": ids}
    if class_name.startswith("LayoutLM"):
        kwargs["bbox"] = torch.zeros(batch, length, 4, dtype=torch.long)
    if class_name.endswith("ForConditionalGeneration"):
        kwargs["decoder_input_ids"] = ids.clone()
    if train and class_name.endswith("QuestionAnswering"):
        kwargs["start_positions"], kwargs["end_positions"] = torch.randint(0, length, (2, batch))
    elif train:
        sequence = class_name.endswith("SequenceClassification")
        kwargs["labels"] = torch.randint(0, config.num_labels, (batch,)) if sequence else ids.clone()
    return model, (), kwargs
