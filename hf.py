"""
Models in the layout of Hugging Face: turn one into a checkpoint of train.py, or a checkpoint into
one.

    python hf.py import PATH_OR_NAME --out_dir=out/qwen    a folder, or a name on the hub
    python hf.py export out/llama/ckpt.pt FOLDER           for AutoModelForCausalLM of transformers

These are model.py's GPT with the settings below, an MLP with swiglu, and RMSNorm:

    llama, mistral    prenorm
    qwen2             prenorm, with biases on queries, keys and values
    qwen3             prenorm, with qk_norm in each head
    olmo2             outnorm, with qk_norm over all heads together

Each key of config.json is used or known to change no number; any other one that is set is refused.
Only .safetensors files are read: a .bin file is a pickle, which can run code. A checkpoint keeps
the dtype of its file. tokenizer.json is copied beside it; it says how a text begins. Chat templates
are not interpreted. Export also takes lns: it folds the factor 1/sqrt(b + 1) into the gain of the
norm. It copies the model's tokenizer.json, but cannot make one from "bytes" or a tokenizer of
tiktoken. If the model was not imported, the copy begins a text with end-of-text, as its training
did.

This needs the package safetensors, and tokenizers to read a tokenizer.json.
"""

import math
import os
import re
import sys
from dataclasses import asdict

import torch

import checkpoint
import data
from attention import head_width
from configurator import configure
from model import GPT, GPTConfig

out_dir = "out"  # import: folder for the checkpoint
block_size: int | None = None  # import: context length; None: that of the model

SOURCE = {"activation": "swiglu", "init": "normal", "init_scale": 0.02, "smear": 0}
SOURCE |= {"value_embeds": False, "embed_scale": None, "head_scale": None, "qk_norm": False}
SOURCE |= {"residual": "prenorm"}
FAMILIES = {  # model_type: settings that differ from SOURCE
    "llama": {},
    "mistral": {"attn_bias": "none"},
    "qwen2": {"attn_bias": "qkv"},
    "qwen3": {"qk_norm": True},
    "olmo2": {"residual": "outnorm", "qk_norm": True, "qk_norm_joint": True},
}
NO_CHANGE = set(  # keys of config.json that change no number of the model
    "architectures auto_map torch_dtype dtype transformers_version use_cache initializer_range "
    "bos_token_id eos_token_id pad_token_id _name_or_path pretraining_tp is_llama_config "
    "max_window_layers _attn_implementation transformers.js_config max_sequence_length max_length "
    "temperature top_p do_sample".split()
)
RENAMES = (  # names here -> names in the files
    (r"^embed\.", "model.embed_tokens."),
    (r"^head\.", "lm_head."),
    (r"^ends\.norm\.gain$", "model.norm.weight"),
    (r"^blocks\.", "model.layers."),
    (r"\.attn\.w([qkvo])\.", r".self_attn.\1_proj."),
    (r"\.attn\.([qk])_norm\.gain$", r".self_attn.\1_norm.weight"),
    (r"\.mlp\.(up|gate|down)\.", r".mlp.\1_proj."),
)
BEFORE = {"attn": "input_layernorm", "mlp": "post_attention_layernorm"}
BEHIND = {"attn": "post_attention_layernorm", "mlp": "post_feedforward_layernorm"}
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
DTYPES = ("F32", "F16", "BF16")


def fail(message):
    raise SystemExit(f"hf.py: {message}")


def safetensors():
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        fail("this needs a package: pip install safetensors")
    return safetensors


# ------------------------------------------------------------------------------------------------
# config.json


class Keys(dict):
    """The keys of config.json that are not used yet."""

    def take(self, key, default=None):
        value = self.maybe(key, default)
        if value is None:
            fail(f"config.json has no {key}")
        return value

    def maybe(self, key, default=None):
        value = self.pop(key, None)
        return default if value is None else value


def to_settings(keys, context=None):
    """config.json -> GPTConfig. context: a shorter block_size than the model's."""
    try:
        config = GPTConfig(**read_keys(Keys(keys), context))
        with torch.device("meta"):
            GPT(config)
    except (ValueError, TypeError, AttributeError) as error:
        fail(f"config.json: {error}")
    return config


def read_keys(keys, context):
    """The settings of GPTConfig that config.json asks for."""
    family = keys.take("model_type")
    if family not in FAMILIES:
        fail(f"model_type={family!r}: choose one of {', '.join(FAMILIES)}")
    n_head = keys.take("num_attention_heads")
    all_heads = n_head if family in ("llama", "olmo2") else None
    found = SOURCE | FAMILIES[family]
    found |= {
        "n_layer": keys.take("num_hidden_layers"),
        "n_head": n_head,
        "n_kv_head": keys.take("num_key_value_heads", all_heads),
        "head_dim": keys.take("head_dim") if family == "qwen3" else keys.maybe("head_dim"),
        "n_embd": keys.take("hidden_size"),
        "n_hidden": keys.take("intermediate_size"),
        "vocab_size": keys.take("vocab_size"),
        "norm_eps": keys.take("rms_norm_eps"),
        "tied": keys.maybe("tie_word_embeddings", False),
        "block_size": context_length(keys, family, context),
    }
    found |= biases(keys, family) | rope(keys)
    activation = keys.maybe("hidden_act", "silu")
    if activation != "silu":
        fail(f"hidden_act={activation!r}: only silu can be imported")
    for key, value in keys.items():
        private = key in NO_CHANGE or key.startswith(("_", "unsloth_"))
        if not private and value not in (None, False, 0, "", [], {}):
            fail(f"config.json has {key}={value!r}, which model.py does not have")
    return found


def context_length(keys, family, context):
    longest = keys.take("max_position_embeddings")
    window = keys.pop("sliding_window", 4096)  # the default of mistral, qwen2 and qwen3
    layers = keys.maybe("layer_types", [])
    slides = keys.maybe("use_sliding_window", False) or family == "mistral"
    slides = slides or "sliding_attention" in layers
    context = longest if context is None else context
    if context > longest:
        fail(f"block_size={context}: max_position_embeddings is {longest}")
    if slides and window is not None and context > window:
        fail(f"sliding_window={window} is shorter than the context: give --block_size={window}")
    unknown = set(layers) - {"full_attention", "sliding_attention"}
    if unknown:
        fail(f"layer_types has {', '.join(sorted(unknown))}: only attention can be imported")
    return context


def biases(keys, family):
    found = {"bias": bool(keys.maybe("mlp_bias", False))}
    if family in ("llama", "qwen3", "olmo2"):  # the others have no such key
        found["attn_bias"] = "all" if keys.maybe("attention_bias", False) else "none"
    return found


def rope(keys):
    """Reads rope_theta and rope_scaling (transformers 4), or rope_parameters (transformers 5)."""
    given = {"rope_theta": keys.maybe("rope_theta", 10000.0)}
    given["partial_rotary_factor"] = keys.maybe("partial_rotary_factor", 1.0)
    given = Keys(given | keys.maybe("rope_scaling", {}) | keys.maybe("rope_parameters", {}))
    old_name = given.maybe("type", "default")
    kind, base = given.maybe("rope_type", old_name), float(given.take("rope_theta"))
    length = given.maybe("original_max_position_embeddings")
    if kind == "default":
        scaling = None
    elif kind == "linear":
        scaling = (float(given.take("factor")),)
    elif kind == "llama3":
        scaling = (*[float(given.take(name)) for name in LLAMA3[:3]], length)
        if length is None:
            fail("rope_scaling of llama3 needs original_max_position_embeddings")
    else:
        fail(f"rope_type={kind!r}: choose one of default, linear, llama3")
    without_effect = (("partial_rotary_factor", 1.0), ("factor", 1.0))
    left = {k: v for k, v in given.items() if (k, v) not in without_effect}
    if left:
        fail(f"config.json has {next(iter(left))}, which rope_type={kind!r} does not use")
    return {"rope_base": base, "rope_scaling": scaling}


def rope_keys(config):
    """rope_theta and rope_scaling, which transformers 4 reads, and the rope_parameters of 5."""
    theta, given = {"rope_theta": config.rope_base}, config.rope_scaling
    if given is None:
        scaling = {"rope_type": "default"}
    elif len(given) == 1:
        scaling = {"rope_type": "linear", "factor": given[0]}
    else:
        scaling = {"rope_type": "llama3", **dict(zip(LLAMA3, given))}
    old = None if given is None else scaling
    return theta | {"rope_scaling": old, "rope_parameters": theta | scaling}


# ------------------------------------------------------------------------------------------------
# Tensors


def file_names(config):
    """{name here: (name in the files, shape)} for all parameters."""
    with torch.device("meta"):
        parameters = dict(GPT(config).named_parameters())
    norms, found = BEHIND if config.residual == "outnorm" else BEFORE, {}
    for name, p in parameters.items():
        other = name
        for pattern, new in RENAMES:
            other = re.sub(pattern, new, other)
        for sublayer, norm in norms.items():
            other = other.replace(f".{sublayer}_residual.norm.gain", f".{norm}.weight")
        found[name] = other, tuple(p.shape)
    return found


def list_files(folder):
    """Paths of the .safetensors files in a folder."""
    index = os.path.join(folder, "model.safetensors.index.json")
    single = os.path.join(folder, "model.safetensors")
    if os.path.exists(single):  # before the index, as in transformers
        return [single]
    if os.path.exists(index):
        where = data.read_json(index).get("weight_map")
        if not isinstance(where, dict) or not where:
            fail(f"{index} has no weight_map")
        for name in where.values():
            if not isinstance(name, str) or os.path.basename(name) != name:
                fail(f"{index}: {name!r} is not a file in its folder")
            if not os.path.exists(os.path.join(folder, name)):
                fail(f"{index} names {name}, which is missing")
        return [os.path.join(folder, name) for name in sorted(set(where.values()))]
    if any(name.endswith((".bin", ".pth", ".pt")) for name in os.listdir(folder)):
        fail(f"{folder} has pickled weights, which can run code: convert them to .safetensors")
    fail(f"{folder} has no model.safetensors and no model.safetensors.index.json")


def read_tensors(folder, wanted):
    """{name here: tensor}. They are mapped into memory, and read when they are used.

    Fails if a tensor is missing or unknown, or has another shape. wanted: what file_names returns.
    """
    by_name = {other: (name, shape) for name, (other, shape) in wanted.items()}
    tensors, library = {}, safetensors()
    for path in list_files(folder):
        try:
            opened = library.safe_open(path, "pt")
        except (library.SafetensorError, OSError) as error:
            fail(f"{path} is not a complete .safetensors file: {error}")
        with opened as file:
            for other in file.keys():
                if other not in by_name:
                    if other == "lm_head.weight":  # of a tied model: import_model compares it
                        tensors["head.weight"] = file.get_tensor(other)
                        continue
                    if other.endswith(".rotary_emb.inv_freq"):  # made from the settings
                        continue
                    fail(f"{path} has a tensor {other}, which config.json does not ask for")
                name, shape = by_name[other]
                part = file.get_slice(other)
                if tuple(part.get_shape()) != shape:
                    fail(f"{path}: {other} is {part.get_shape()}, config.json says {[*shape]}")
                if part.get_dtype() not in DTYPES:
                    fail(f"{path}: {other} is {part.get_dtype()}, not one of {', '.join(DTYPES)}")
                tensors[name] = file.get_tensor(other)
    missing = sorted(other for name, (other, _) in wanted.items() if name not in tensors)
    if missing:
        fail(f"{folder} lacks {missing[0]}" + f" and {len(missing) - 1} more" * (len(missing) > 1))
    return tensors


# ------------------------------------------------------------------------------------------------
# Import


def folder_of(source, wanted):
    """A folder as it is. The wanted files of a name come from the hub, or from its cache."""
    if os.path.isdir(source):
        return source
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", source) or source.startswith("."):
        fail(f"{source}: not a folder, and not a name on the hub like Qwen/Qwen3-0.6B")
    from huggingface_hub import snapshot_download

    try:
        others = ["consolidated*", "*/*"]
        return snapshot_download(source, allow_patterns=wanted, ignore_patterns=others)
    except Exception as error:  # the hub's errors have no common class
        reason = data.reason_of(error)
        fail(f"{source} cannot be downloaded: {reason}; HF_TOKEN may help for a private model")


def tokenizer_meta(folder, config):
    """What data.meta_tokenizer needs. "tokenizer" is None if the folder has no tokenizer.json."""
    path = os.path.join(folder, "tokenizer.json")
    if not os.path.exists(path):
        return {"tokenizer": None, "tokenizer_sha256": None, "vocab_size": config.vocab_size}
    encoding = data.get_tokenizer(path)
    if encoding.n_vocab > config.vocab_size:
        fail(f"{path} has {encoding.n_vocab} tokens, the model only {config.vocab_size}")
    meta = {
        "tokenizer": "tokenizer.json",
        "tokenizer_sha256": data.fingerprint(encoding).hex(),
        "vocab_size": encoding.n_vocab,
        "eot": encoding.eot_token,
        "bos": encoding.bos_token,
        "start": encoding.own_start(),
    }
    stops = {encoding.eot_token: None}
    for path in (os.path.join(folder, name) for name in ("config.json", "generation_config.json")):
        ids = data.read_json(path).get("eos_token_id") if os.path.exists(path) else None
        stops |= dict.fromkeys(ids if isinstance(ids, list) else [ids])
    stops = [i for i in stops if i is not None]
    return meta | {"stops": stops} if len(stops) > 1 else meta


def import_model(source, to, context=None):
    """Write to/ckpt.pt, and to/tokenizer.json if there is one."""
    safetensors()
    if checkpoint.newest(to):
        fail(f"{to} already holds a checkpoint: give another --out_dir")
    if os.path.exists(os.path.join(to, "config.json")):
        fail(f"{to} holds a model of Hugging Face: give another --out_dir")
    folder = folder_of(source, ["*.json"])
    keys = data.read_json(os.path.join(folder, "config.json"))
    config = to_settings(keys, context)
    meta = tokenizer_meta(folder, config)
    folder = folder_of(source, ["*.json", "*.safetensors"])  # the weights only after these checks
    wanted = file_names(config)
    tensors = read_tensors(folder, wanted)
    if config.tied:
        head = tensors.get("head.weight", tensors["embed.weight"])
        if not torch.equal(head, tensors["embed.weight"]):
            fail("lm_head.weight is not the embedding, but config.json has tie_word_embeddings")
        tensors["head.weight"] = tensors["embed.weight"]
    state = {"config": asdict(config), "meta": meta, "step": 0, "model": tensors}
    state["settings"] = {"data_dir": None, "loss_chunk": 2048}
    data.make_folder(to)
    if meta["tokenizer"]:
        checkpoint.copy_tokenizer(folder, to, names=["tokenizer.json"])
        special = special_tokens(data.meta_tokenizer(to, meta))
        data.write_json(os.path.join(to, "tokenizer_config.json"), special)
    path = os.path.join(to, checkpoint.NEWEST)
    checkpoint.save(path, state)
    count = sum(math.prod(shape) for _, shape in wanted.values())
    shape = f"residual={config.residual}, block_size={config.block_size}"
    print(f"{path}: {count:,} parameters, {shape}")


# ------------------------------------------------------------------------------------------------
# Export


def family_of(c):
    """(model_type, its own keys). Fails with everything that transformers has no class for."""
    attention, behind = c.attn_bias or ("all" if c.bias else "none"), c.residual == "outnorm"
    wanted = {"norm": "rms", "activation": "swiglu", "moe_experts": 0, "mod_rate": 0.0, "smear": 0}
    wanted |= {"value_embeds": False, "logit_cap": None, "branch_scale": "one"}
    wanted |= {"qk_norm_joint": behind}
    own = {name: getattr(c, name) for name in wanted}
    missing = [f"{k}={own[k]!r} (only {value!r})" for k, value in wanted.items() if own[k] != value]
    if c.residual not in ("prenorm", "lns", "outnorm"):
        missing.insert(0, f"residual={c.residual!r} (only prenorm, lns, outnorm)")
    if c.n_embd % c.n_head:
        missing.append(f"n_head={c.n_head} (only divisors of n_embd={c.n_embd})")
    if c.bias and (c.qk_norm or attention == "qkv"):
        missing.append("bias=True (only False with qk_norm or attn_bias='qkv')")
    if c.qk_norm and attention == "qkv":
        missing.append("attn_bias='qkv' (only none or all with qk_norm)")
    if missing:
        fail(f"transformers has no class for {', '.join(missing)}")
    if c.qk_norm:
        return ("olmo2" if behind else "qwen3"), {"attention_bias": attention == "all"}
    if attention == "qkv":
        return "qwen2", {}
    return "llama", {"attention_bias": attention == "all", "mlp_bias": c.bias}


def to_keys(config, hidden, meta, dtype):
    """GPTConfig -> config.json."""
    family, own = family_of(config)
    return {
        "architectures": [family.capitalize() + "ForCausalLM"],
        "model_type": family,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_kv_head or config.n_head,
        "head_dim": head_width(config),
        "hidden_size": config.n_embd,
        "intermediate_size": hidden,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.block_size,
        "rms_norm_eps": config.norm_eps,
        **rope_keys(config),
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        "bos_token_id": meta.get("bos"),
        "pad_token_id": None,
        "eos_token_id": meta.get("stops", meta.get("eot")),
        "dtype": str(dtype).removeprefix("torch."),
        **own,
    }


def export_model(path, folder):
    """Write config.json, model.safetensors and, if the model has one, tokenizer.json."""
    library = safetensors()
    state = checkpoint.load(path)
    config = GPTConfig(**state["config"])
    family_of(config)  # refuse a model that cannot be exported before any work
    if state.get("lora"):
        fail(f"{path} holds adapters: merge them first: python lora.py {path} OUT.pt")
    there = os.listdir(folder) if os.path.isdir(folder) else []
    if any(name.endswith((".json", ".safetensors")) for name in there):
        fail(f"{folder} already holds a model, or a part of one: give another folder")
    tensors, hidden = {}, 0
    for name, (other, shape) in file_names(config).items():
        tensor = state["model"].get(name)
        if tensor is None or tuple(tensor.shape) != shape:
            fail(f"{path} does not fit its own settings: {name}")
        hidden = shape[0] if name.endswith("mlp.up.weight") else hidden
        layer = re.match(r"blocks\.(\d+)\.\w+_residual\.norm\.gain", name)
        if config.residual == "lns" and layer:
            tensor = tensor * (int(layer[1]) + 1) ** -0.5
        tensors[other] = tensor.contiguous()
    dtype = next(iter(tensors.values())).dtype
    keys = to_keys(config, hidden, state["meta"], dtype)
    encoding = tokenizer_of(state)
    data.make_folder(folder)
    file = os.path.join(folder, "model.safetensors")
    library.torch.save_file(tensors, file + ".tmp", metadata={"format": "pt"})
    os.replace(file + ".tmp", file)
    if encoding is not None:
        special = special_tokens(encoding)
        if encoding.imported:
            source = os.path.dirname(encoding.path)
            checkpoint.copy_tokenizer(source, folder, names=["tokenizer.json"])
        else:
            from tokenizers.processors import TemplateProcessing

            first = special["eos_token"]  # training began each text with it
            known = [(first, encoding.eot_token)]
            encoding.inner.post_processor = TemplateProcessing([first, "$A"], special_tokens=known)
            encoding.inner.save(os.path.join(folder, "tokenizer.json"))
        data.write_json(os.path.join(folder, "tokenizer_config.json"), special)
    data.write_json(os.path.join(folder, "config.json"), keys)  # last: it marks a complete export
    print(f"{folder}: a {keys['model_type']} model with {len(tensors)} tensors")
    if encoding is None:
        name = state["meta"].get("tokenizer")
        print(f"no tokenizer.json was written: the model's tokenizer is {name!r}")


# ------------------------------------------------------------------------------------------------
# Tokenizers


def tokenizer_of(state):
    """The tokenizer of a checkpoint, or None if it is not a tokenizer.json."""
    meta, data_dir = state["meta"], state["settings"].get("data_dir")
    if not (meta.get("tokenizer") or "").endswith(".json"):
        return None
    folder = os.path.dirname(state["path"]) if data.is_imported(meta) else data_dir
    return data.meta_tokenizer(folder, meta)


def special_tokens(encoding):
    """tokenizer_config.json: what ends and what begins a text."""
    name = lambda i: encoding.decode_single_token_bytes(i).decode()
    found = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": name(encoding.eot_token)}
    return found if encoding.bos_token is None else found | {"bos_token": name(encoding.bos_token)}


def main(argv):
    words = [arg for arg in argv if arg and not arg.startswith("--")]
    given = [arg for arg in argv if arg.startswith("--")]
    configure(globals(), argv=given)
    if len(words) == 2 and words[0] == "import":
        import_model(words[1], out_dir, block_size)
    elif len(words) == 3 and words[0] == "export" and not given:
        export_model(*words[1:])
    else:
        what = " ".join(argv) or "no arguments"
        fail(f"{what}: give import MODEL [--out_dir=DIR] [--block_size=N], or export CKPT DIR")


if __name__ == "__main__":
    main(sys.argv[1:])
