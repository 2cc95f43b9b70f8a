"""
A GPT with interchangeable residual modes. The rest is nearly standard: rotary positions,
grouped-query attention, an MLP. A mode decides two lines of Block.sublayer, the one that reads the
stream and the one that writes to it, and how the stream begins and ends; nGPT changes more.

Sizes in comments: B batch, T time, C n_embd, H n_head, G n_kv_head, D head width, V vocab_size.
"""

import math
from dataclasses import dataclass, fields
from functools import partial

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import attnres
import bhyt
import configurator
import mod
import moe
import nag
import ngpt
import norms
import streams
from attention import Attention, gather_rows, head_width, rotary_table
from muon import Muon
from norms import pick

BETAS = (0.9, 0.95)  # of AdamW
# name: class
RESIDUALS = norms.RESIDUALS | nag.RESIDUALS | bhyt.RESIDUALS | ngpt.RESIDUALS
RESIDUALS |= streams.RESIDUALS | attnres.RESIDUALS


@dataclass
class GPTConfig:
    n_layer: int = 8  # blocks, each of attention and MLP
    n_head: int = 2  # query heads
    n_kv_head: int | None = None  # key and value heads; None: as many as n_head
    head_dim: int | None = None  # width of a head; None: n_embd / n_head
    n_embd: int = 128  # width of the stream
    n_hidden: int | None = None  # width of the MLP; None: 4 n_embd, for swiglu about 8/3 n_embd
    block_size: int = 256  # context length in tokens
    vocab_size: int = 257  # 256 bytes and end-of-text; gpt2 BPE: 50257, or 50304 for speed
    residual: str = "ihc"  # how sublayers read and write the stream: a name from RESIDUALS
    norm: str = "rms"  # rms, layer or none
    norm_eps: float = 1e-6  # epsilon of the norms, inside the root
    activation: str = "relu"  # gelu (exact, by erf), relu, relu2, silu or swiglu
    qk_norm: bool = True  # RMSNorm on queries and keys
    qk_norm_joint: bool = False  # qk_norm over all heads together; False: in each head
    rope_base: float = 10000.0  # base of the rotary frequencies
    rope_scaling: tuple | None = None  # longer contexts, see attention.scaled
    bf16_stream: bool = False  # keep the stream in bfloat16 under bfloat16 autocast
    tied: bool = False  # one matrix for embedding and head
    smear: int = 4  # tokens before the current one whose embeddings are added to its own
    value_embeds: bool = True  # every second block adds an embedding of the token to its values
    logit_cap: float | None = None  # logits become cap tanh(logits / cap); None: no cap
    bias: bool = False  # biases in the linears, and LayerNorm's shift
    attn_bias: str | None = None  # biases in the attention: none, qkv or all; None: as bias says
    dropout: float = 0.0  # on the embedding, the attention weights and every sublayer's output
    init: str = "kaiming"  # linears: normal, kaiming (gain of the activation), xavier or uniform
    init_scale: float = 0.05  # std of normal, bound of uniform; default of the next two
    embed_scale: float | None = 0.8  # std of the embedding; None: init_scale
    head_scale: float | None = 0.001  # std of a head that is not tied; None: init_scale
    init_out: str | None = None  # output projections: scaled, plain or zero; None: mode's default
    branch_scale: str = "one"  # factor on sublayer outputs: one, or depth for 1/sqrt(n_layer)
    dyt_alpha: tuple = (1.0, 0.5, 0.5)  # dyt: initial alpha before attention, MLP and head
    bhyt_lambda: tuple = (2.0, 1.0, 0.0)  # bhyt: initial lambda before the same; head 0: RMSNorm
    bhyt_learned: bool = True  # bhyt: learn lambda
    bhyt_unit: bool = False  # bhyt: initial gamma gives outputs of variance 1; False: gamma is 1
    bhyt_context: int | None = None  # bhyt, prenorm_approx: context length T in c; None: block_size
    nag_directions: int = 32  # nag: directions of the modulator; 0: no modulator, m = 1
    nag_centre: bool = True  # nag: subtract the mean from updates
    nag_orthogonal: bool = True  # nag: remove the part of an update along the stream
    nag_lane: bool = True  # nag: the norm sets the logits' temperature; False: g_dec alone does
    nag_first_logits: float | None = 0.75  # nag: std of first logits; None: exp(s) <r, w> / d
    hc_streams: int | None = None  # hc, mhc, ihc, smhc, gated, wide: streams; None: ihc 2, else 4
    mhc_start: str = "prenorm"  # mhc, ihc, smhc: first maps: prenorm, paper or deepseek
    attnres_size: int | None = None  # attnres_block: sublayers a block; None: at most 8 blocks
    moe_experts: int = 0  # experts in place of each MLP; 0: one MLP
    moe_top_k: int = 2  # moe: experts per token
    moe_shared: int = 0  # moe: width of an expert that all tokens use; 0: none
    moe_balance: str = "bias"  # moe: how the load is balanced: bias or loss
    mod_on: str = "none"  # which sublayers tokens may skip: none, attention, mlp or both
    mod_rate: float = 0.0  # mod: share of tokens that skip
    mod_router: str = "nag"  # mod: the router: nag, learned or random
    mod_budget: str = "global"  # mod: mod_rate is over all sublayers (global) or in each (layer)
    mod_fallback: bool = False  # mod, nag router: skipped tokens rotate towards a learned direction


MODEL_SETTINGS = {field.name for field in fields(GPTConfig)}


# ------------------------------------------------------------------------------------------------
# Sublayers


class Relu(torch.autograd.Function):
    """max(z, 0). The backward reads the output that the next linear keeps anyway.

    Compiled F.relu keeps a mask of booleans as well, which is slow to write and read on a CPU.
    """

    @staticmethod
    def forward(ctx, z):
        y = F.relu(z)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * y.sign()


ACTIVATIONS = {  # name: (function, whether it is gated, variance-preserving gain for the init)
    "gelu": (F.gelu, False, 1.7),
    "relu": (Relu.apply, False, math.sqrt(2)),
    "relu2": (lambda z: Relu.apply(z).square(), False, (2 / 3) ** 0.25),
    "silu": (F.silu, False, 1.7),
    "swiglu": (F.silu, True, 1.7),
}


class MLP(nn.Module):
    def __init__(self, config, hidden):
        super().__init__()
        self.act, gated, _ = ACTIVATIONS[config.activation]
        self.up = nn.Linear(config.n_embd, hidden, config.bias)
        self.gate = nn.Linear(config.n_embd, hidden, config.bias) if gated else None
        self.down = nn.Linear(hidden, config.n_embd, config.bias)

    def forward(self, h, docs=None):  # docs are for experts
        if self.gate is None:
            return self.down(self.act(self.up(h)))
        return self.down(self.act(self.gate(h)) * self.up(h))


def make_mlp(config):
    act, gated, _ = ACTIVATIONS[config.activation]
    hidden = config.n_hidden or (64 * math.ceil(config.n_embd / 24) if gated else 4 * config.n_embd)
    if not config.moe_experts:
        return MLP(config, hidden)
    shared = MLP(config, config.moe_shared) if config.moe_shared else None
    return moe.MoE(config, act, gated, hidden, shared)


class Block(nn.Module):
    def __init__(self, config, b):
        super().__init__()
        residual = RESIDUALS[config.residual]
        attention = residual.attention or Attention
        self.attn, self.attn_residual = attention(config, b), residual(config, 2 * b + 1)
        self.mlp, self.mlp_residual = make_mlp(config), residual(config, 2 * b + 2)
        residual.equip(self, config)
        self.attn_router = self.mlp_router = None
        if config.mod_on in ("attention", "both"):
            self.attn_router = mod.Router(config, self.attn_residual, 2 * b + 1)
        if config.mod_on in ("mlp", "both"):
            self.mlp_router = mod.Router(config, self.mlp_residual, 2 * b + 2)
        self.scale = config.n_layer**-0.5 if config.branch_scale == "depth" else 1.0
        self.drop = nn.Dropout(config.dropout)

    def forward(self, stream, rope, docs=None, cache=None, values=None):
        return self.feed(self.attend(stream, rope, docs, cache, values), docs)

    def attend(self, stream, rope, docs=None, cache=None, values=None):
        def run(h, rows=None):
            return self.drop(self.attn(h, rope, docs, cache, rows, values))

        return self.sublayer(run, self.attn_residual, self.attn_router, stream, docs)

    def feed(self, stream, docs=None):
        counted = docs if self.training else None  # experts count their load in training only

        def run(h, rows=None):
            if rows is None:
                return self.drop(self.mlp(h, counted))
            of_rows = None if counted is None else gather_rows(counted, rows)
            return self.drop(self.mlp(gather_rows(h, rows), of_rows))

        return self.sublayer(run, self.mlp_residual, self.mlp_router, stream, docs)

    def sublayer(self, run, residual, router, stream, docs):
        h, stream = residual.read(stream)
        if router is None:
            return residual.write(stream, run(h), self.scale)
        return router(run, residual, h, stream, self.scale, docs)

    def flops(self, scores):
        """FLOPs per token of (attention, the MLP). scores: FLOPs of the attention scores.

        A skipped query counts no scores, also where attention.FLASH computes them and drops them.
        """
        attention = matmul_flops((*self.attn.modules(), *self.attn_residual.modules())) + scores
        mlp = matmul_flops((*self.mlp.modules(), *self.mlp_residual.modules()))
        if self.attn_router is not None:  # keys and values are computed for all tokens
            skipped = 1 - self.attn_router.k / self.attn_router.T
            attention -= skipped * (matmul_flops((self.attn.wq, self.attn.wo)) + scores)
        if self.mlp_router is not None:
            mlp -= (1 - self.mlp_router.k / self.mlp_router.T) * matmul_flops(self.mlp.modules())
        return attention, mlp


def matmul_flops(modules):
    """FLOPs per token of the matrix products of a training step."""
    total = 0
    for m in modules:
        share = m.k / m.E if isinstance(m, moe.MoE) else 1
        uses = getattr(m, "uses", {})  # products of a token with each matrix, if not one
        for name, p in m.named_parameters(recurse=False):
            passes = 3 if p.requires_grad else 2  # forward, gradients of inputs, of weights
            total += 2 * passes * share * uses.get(name, 1) * p.numel() if p.ndim >= 2 else 0
    return total


# ------------------------------------------------------------------------------------------------
# The model


class Smear(nn.Module):
    """e_t <- e_t + sum_k w_k * e_{t-k} for k = 1 to n: a position also sees the n before it."""

    def __init__(self, config):
        super().__init__()
        self.w = nn.Parameter(torch.empty(config.smear, config.n_embd))

    def reset_parameters(self):
        nn.init.normal_(self.w)

    def forward(self, e, before, docs=None):
        """e (B, T, C), and the n embeddings before it, (B, n, C)"""
        T, n = e.size(1), len(self.w)
        x = torch.cat((before, e), dim=1)
        for k, w in enumerate(self.w, 1):
            shifted = x[:, n - k : n - k + T]
            if docs is not None:
                same = docs == F.pad(docs, (k, 0), value=-1)[:, :T]
                shifted = shifted * same[..., None]
            e = e + w * shifted
        return e


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        check(config)
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.smear = Smear(config) if config.smear else None
        self.ends = RESIDUALS[config.residual].ends(config)
        self.blocks = nn.ModuleList(Block(config, b) for b in range(config.n_layer))
        self.value_embeds = nn.ModuleDict()
        for b, block in enumerate(self.blocks):
            if block.attn.value_gate is not None:
                width = block.attn.wv.out_features
                self.value_embeds[str(b)] = nn.Embedding(config.vocab_size, width)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        self.drop = nn.Dropout(config.dropout)
        self.loss_chunk, self.recompute = None, False  # train.py's settings of the same names
        self.summed_loss = summed_loss  # compile_blocks compiles it
        for name, table in zip(("cos", "sin"), rotary_table(config)):
            self.register_buffer(name, table, persistent=False)
        self.init_weights()
        self.after_step()
        self.refresh()

    def forward(self, idx, targets=None, docs=None, cache=None, last=False):
        """Token ids (B, T) -> (logits, loss).

        Without targets: logits (B, T, V), or (B, 1, V) of the last position, and no loss.
        With targets (B, T): no logits, and the mean cross-entropy, without targets of -1, plus in
        training the penalty of moe.py. docs (B, T) numbers the documents of a row; a token attends
        only within its document. 0 is padding, which routers and experts do not count.
        """
        hidden, head = self.hidden(idx, docs, cache)
        if targets is None:
            return self.logits(hidden[:, -1:] if last else hidden, head), None
        penalty = moe.penalty(self) if self.training else 0.0
        return None, self.loss(hidden, head, targets) + penalty

    def logits(self, hidden, head):
        """Hidden states (..., C) and the head's weights (V, C) -> logits (..., V)."""
        return capped_logits(hidden, head, self.config.logit_cap)

    def loss(self, hidden, head, targets):
        """The mean cross-entropy. With loss_chunk, the logits of at most so many tokens exist at
        a time; the backward pass recomputes them."""
        hidden, targets = hidden.flatten(0, 1), targets.flatten()
        head = head.view_as(head)  # eager autocast would add the gradients of all parts in bfloat16
        total_of = partial(self.summed_loss, head=head, cap=self.config.logit_cap)
        if self.loss_chunk is None:
            total = total_of(hidden, targets)
        else:
            parts = zip(hidden.split(self.loss_chunk), targets.split(self.loss_chunk))
            total = sum(checkpoint(total_of, h, y, use_reentrant=False) for h, y in parts)
        return total / (targets >= 0).sum().clamp(min=1)

    def hidden(self, idx, docs=None, cache=None):
        """Returns hidden states (B, T, C) and head weights (V, C), for logits."""
        T, at = idx.size(1), torch.arange(idx.size(1), device=idx.device)
        if T > self.config.block_size:
            raise ValueError(f"{T} tokens do not fit into block_size={self.config.block_size}")
        at = at if cache is None else cache.at + at
        rope = (self.cos[:T], self.sin[:T]) if cache is None else (self.cos[at], self.sin[at])
        stream = self.begin(idx, at, docs, cache)
        moe.reset_penalties(self)
        for b, block in enumerate(self.blocks):
            recompute = self.recompute and self.training
            run = partial(checkpoint, block, use_reentrant=False) if recompute else block
            kv = None if cache is None else cache.layer(b, at)
            stream = run(stream, rope, docs, kv, self.values(b, idx))
        if cache is not None:
            cache.at += T
        return self.ends(stream, self.head.weight)

    def values(self, b, idx):
        """What block b adds to the values of its attention, (B, T, G D) or None."""
        return self.value_embeds[str(b)](idx) if str(b) in self.value_embeds else None

    def before(self, idx, at, cache):
        """Embeddings of the config.smear tokens before idx, (B, smear, C). 0 before the first."""
        n = self.config.smear
        if cache is None:
            return self.embed.weight.new_zeros(len(idx), n, self.config.n_embd)
        cache.ids.index_copy_(1, n + at, idx)
        ids = cache.ids[:, at[0] + torch.arange(n, device=at.device)]
        known = (ids < self.config.vocab_size)[..., None]
        return known * self.embed(torch.where(known[..., 0], ids, 0))

    def begin(self, idx, at, docs=None, cache=None):
        """The stream before the first block. at (T,): positions of the tokens."""
        e = self.embed(idx)
        if self.smear is not None:
            e = self.smear(e, self.before(idx, at, cache), docs)
        e = self.drop(e)
        if self.config.bf16_stream and torch.is_autocast_enabled(e.device.type):
            e = e.bfloat16()
        return self.ends.embed(e).replace(at=at[:, None])

    @torch.no_grad()
    def init_weights(self):
        """Initialise every parameter, here or in its module's reset_parameters; else raise."""
        config, done = self.config, set()
        gain = ACTIVATIONS[config.activation][2]
        scales = (config.embed_scale, config.head_scale)
        embed_std, head_std = (config.init_scale if x is None else x for x in scales)
        mlps = [mlp for block in self.blocks for mlp in block.mlp.modules() if isinstance(mlp, MLP)]
        outputs = {block.attn.wo for block in self.blocks} | {mlp.down for mlp in mlps}
        in_mlp = {m for block in self.blocks for m in block.mlp.modules()}
        shrinks = {"scaled": (2 * config.n_layer) ** -0.5, "plain": 1.0, "zero": 0.0}
        shrink = shrinks[init_out(config)]
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=embed_std)
            elif isinstance(module, nn.Linear):
                if module is not self.head:
                    factor = gain if module in in_mlp else 1.0
                    INITS[config.init](module.weight, config.init_scale, factor)
                elif not config.tied:
                    nn.init.normal_(module.weight, std=head_std)
                if module in outputs:
                    module.weight.mul_(shrink)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, moe.MoE):
                for expert in (w for p in module.parameters(recurse=False) for w in p):
                    INITS[config.init](expert, config.init_scale, gain)
                module.down.mul_(shrink)
            elif hasattr(module, "reset_parameters"):
                module.reset_parameters()
            else:
                continue
            done.update(module.parameters(recurse=False))
        for block in self.blocks:
            RESIDUALS[config.residual].init_sublayers(block, config)
        left = [name for name, p in self.named_parameters() if p not in done]
        if left:
            names = ", ".join(left)
            raise RuntimeError(f"no rule initialises {names}: give their module reset_parameters")

    def compile_blocks(self):
        """Compile each block, the readout, and logits with their loss. Equal blocks share one
        graph, so that the time to compile does not grow with depth.

        Blocks have graphs of their own if they differ in value embeddings, in what they skip, in
        the k of their routers or, in some modes, in their place: each block of attnres reads
        another number of sources.
        """
        # a backward runs outside autocast, so that products in float32 have float32 gradients
        torch._functorch.config.backward_pass_autocast = "off"
        limits = torch._dynamo.config
        limits.allow_unspec_int_on_nn_module = True  # a router's k changes
        most = 8 * len(self.blocks)  # 8 is torch's limit for one block, in training and evaluation
        limits.recompile_limit = max(limits.recompile_limit, most)
        limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, most)
        options = compile_options(self.config.residual, self.embed.weight.device.type)
        for part in (*self.blocks, self.ends):
            part.compile(options=options)
        self.summed_loss = torch.compile(summed_loss, options=options)

    def refresh(self):
        """Recompute what residuals derive from the weights, such as BHyT's c."""
        for block in self.blocks:
            block.attn_residual.refresh(block.attn)

    def after_step(self):
        """Let the mode change its weights after an optimizer step, such as nGPT's Eq. 1."""
        self.ends.after_step(self)

    def param_groups(self):
        """Parameter names by optimizer group. The owning module decides, never the name.

        gates: the parameters of a residual except the gains of its norms, scalars of norms, and
        the routers of mod.py.
        maps: the parameters of a residual that decay: those that its class lists in `decays`.
        """
        kinds = ("matrices", "experts", "embeddings", "head", "maps", "vectors", "gates")
        groups = {kind: [] for kind in kinds}
        residual = RESIDUALS[self.config.residual]
        of_mode = (residual, residual.ends)
        for name, p in self.named_parameters():
            owner = self.get_submodule(name.rpartition(".")[0])
            if isinstance(owner, nn.Embedding):
                groups["embeddings"].append(name)
            elif owner is self.head:
                groups["head"].append(name)
            elif isinstance(owner, moe.MoE):  # (E, out, in): many matrices
                groups["experts"].append(name)
            elif isinstance(owner, nn.Linear) and p.ndim == 2:
                groups["matrices"].append(name)
            elif isinstance(owner, of_mode) and name.rpartition(".")[2] in owner.decays:
                groups["maps"].append(name)
            elif isinstance(owner, (*of_mode, mod.Router)):
                groups["gates"].append(name)
            elif p.numel() == 1 and not isinstance(owner, (nn.Linear, Attention)):
                groups["gates"].append(name)
            else:
                groups["vectors"].append(name)
        return groups

    def optimizers(self, kind, learning_rate, rates, weight_decay, dtype=None):
        """AdamW for all, or Muon for matrices and experts and AdamW for the rest.

        rates are peak learning rates of other groups, such as {"gates": 1e-3}. "peak" of a group is
        its highest learning rate. dtype: that of Muon's products; None: of the parameters.
        """
        named, names = dict(self.named_parameters()), self.param_groups()
        assert sorted(sum(names.values(), [])) == sorted(named), "each parameter is in one group"
        decays = dict.fromkeys(names, weight_decay) | {"vectors": 0.0, "gates": 0.0}
        groups = {}
        for key in names:
            params = [named[n] for n in names[key] if named[n].requires_grad]
            peak = rates.get(key, learning_rate)
            if params:
                groups[key] = {"params": params, "peak": peak, "weight_decay": decays[key]}
        made = []
        if kind == "muon":
            matrices = [groups.pop(key) for key in ("matrices", "experts") if key in groups]
            made.append(Muon(matrices, learning_rate, dtype=dtype))
        if groups:  # none are left if Muon trains only adapters
            fused = self.embed.weight.device.type in ("cuda", "cpu")
            made.append(torch.optim.AdamW([*groups.values()], learning_rate, BETAS, fused=fused))
        return made

    def num_params(self, active=False):
        """active: count only the experts that a token uses."""
        total = sum(p.numel() for p in self.parameters())
        for m in moe.layers(self) if active else ():
            total -= (1 - m.k / m.E) * sum(p.numel() for p in m.parameters(recurse=False))
        return round(total)

    def flops_per_token(self):
        """Matmul FLOPs that a training step needs per token. Devices may compute more.

        The forward takes 2 for each weight of a matrix, including the head. Attention takes 2 C for
        each score and 2 C to sum values, over (T + 1) / 2 keys on average. The backward takes twice
        as much as the forward.
        Experts that a token does not use, sublayers that it skips (k of T tokens run) and gradients
        of frozen weights do not count.
        """
        return matmul_flops((*self.ends.modules(), self.head)) + sum(map(sum, self.block_flops()))

    def block_flops(self):
        """What flops_per_token counts of each block: [(attention, MLP)]."""
        C, T = self.config.n_head * head_width(self.config), self.config.block_size
        return [block.flops(scores=6 * C * (T + 1)) for block in self.blocks]


def compile_options(residual, device_type):
    """Options of torch.compile for a mode, or None. For CUDA it also changes a global setting."""
    if device_type != "cuda":
        return None
    torch._functorch.config.ban_recompute_used_far_apart = False  # it stores float32 copies
    return RESIDUALS[residual].cuda_options or None


def init_out(config):
    """Initialisation of the output projections: the setting, or the mode's default."""
    return config.init_out or RESIDUALS[config.residual].init_out


def settings_of_others(*residuals):
    """{name: default} of the settings that belong to residual modes, but to none of these."""
    owned = {name for mode in RESIDUALS.values() for name in mode.settings}
    others = owned - {name for residual in residuals for name in RESIDUALS[residual].settings}
    return {field.name: field.default for field in fields(GPTConfig) if field.name in others}


CHOICES = {  # settings that must be one of some names
    "residual": RESIDUALS,
    "norm": norms.NORMS,
    "activation": ACTIVATIONS,
    "init_out": (None, "scaled", "plain", "zero"),
    "branch_scale": ("one", "depth"),
    "mod_on": ("none", "attention", "mlp", "both"),
    "init": ("normal", "kaiming", "xavier", "uniform"),
    "mod_router": ("nag", "learned", "random"),
    "mod_budget": ("global", "layer"),
    "moe_balance": ("bias", "loss"),
    "mhc_start": streams.STARTS,
    "attn_bias": (None, "none", "qkv", "all"),
}

AT_LEAST_1 = "n_layer n_head n_kv_head head_dim n_embd n_hidden block_size vocab_size"
AT_LEAST_1 += " bhyt_context hc_streams attnres_size"
FROM_0 = "smear head_scale moe_experts moe_shared nag_directions"
ABOVE_0 = "rope_base init_scale embed_scale logit_cap norm_eps"
RANGES = (
    (AT_LEAST_1, lambda v: v >= 1, "at least 1"),
    (ABOVE_0, lambda v: 0 < v < math.inf, "above 0 and finite"),
    ("nag_first_logits", lambda v: 1e-3 <= v < math.inf, "at least 0.001 and finite"),
    (FROM_0, lambda v: 0 <= v < math.inf, "at least 0 and finite"),
    ("dropout mod_rate", lambda v: 0 <= v < 1, "at least 0 and below 1"),
)


def numbers(values, n):
    """Whether values are n finite numbers."""
    finite = (isinstance(value, (int, float)) and math.isfinite(value) for value in values)
    return len(values) == n and all(finite)


def check(config):
    """Raise a ValueError that names the setting and says what it may be."""
    c, C, H, G = config, config.n_embd, config.n_head, config.n_kv_head or config.n_head
    configurator.check(vars(c), RANGES, ValueError)
    for name, choices in CHOICES.items():
        pick(dict.fromkeys(choices), getattr(c, name), name)
    lambdas = numbers(c.bhyt_lambda, 3) and min(c.bhyt_lambda[:2]) > 0 and c.bhyt_lambda[2] >= 0
    unset = (None, GPTConfig.head_scale)
    fits_head = not c.tied or c.embed_scale != GPTConfig.embed_scale
    scaled = c.init_scale == GPTConfig.init_scale or c.init in ("normal", "uniform")
    scaled = scaled or c.embed_scale is None or (c.head_scale is None and not c.tied)
    scaling = (1.0,) if c.rope_scaling is None else c.rope_scaling
    scales = len(scaling) in (1, 4) and numbers(scaling, len(scaling)) and min(scaling) > 0
    scales = scales and (len(scaling) == 1 or scaling[1] < scaling[2])
    experts = not c.moe_experts or 1 <= c.moe_top_k <= c.moe_experts
    rescales = RESIDUALS[c.residual].rescales and c.norm != "none"
    learns = not c.moe_experts or c.moe_top_k > 1 or c.moe_shared or not rescales
    rules = (
        (not c.tied or c.head_scale in unset, f"head_scale={c.head_scale} needs tied=False"),
        (fits_head, "tied=True needs scales of a head, such as --embed_scale=0.05 --embed_lr=0.01"),
        (scaled, f"init={c.init!r} does not use init_scale={c.init_scale}"),
        (c.head_dim or C % H == 0, f"n_embd={C} does not divide into n_head={H} heads"),
        (head_width(c) % 2 == 0, f"heads of width {head_width(c)}: rotary needs an even width"),
        (c.qk_norm or not c.qk_norm_joint, "qk_norm_joint=True needs qk_norm=True"),
        (scales, f"rope_scaling={scaling!r}: give (factor,) or (factor, low, high, length)"),
        (H % G == 0, f"n_head={H} query heads do not divide over n_kv_head={G}"),
        (numbers(c.dyt_alpha, 3), f"dyt_alpha={c.dyt_alpha!r}: give three starts"),
        (lambdas, f"bhyt_lambda={c.bhyt_lambda!r}: give three starts, two above 0, one at least 0"),
        (c.mod_on == "none" or c.mod_rate > 0, f"mod_on={c.mod_on!r} needs mod_rate above 0"),
        (experts, f"moe_top_k={c.moe_top_k}: must be from 1 to moe_experts={c.moe_experts}"),
        (learns, f"moe_top_k=1: no gradient with {c.residual}: set moe_top_k=2 or moe_shared"),
    )
    for holds, message in rules:
        if not holds:
            raise ValueError(message)
    for prefix, on, needed in (
        ("moe_", c.moe_experts > 0, "moe_experts above 0"),
        ("mod_", c.mod_on != "none", "mod_on"),
    ):
        for field in fields(c):
            unused = field.name.startswith(prefix) and not on
            if unused and getattr(c, field.name) != field.default:
                raise ValueError(f"{field.name} needs {needed}")
    norms.refuse(c, **settings_of_others(c.residual))


INITS = {  # name: (weight, scale, gain of the activation) -> None
    "normal": lambda w, scale, gain: nn.init.normal_(w, std=scale),
    "kaiming": lambda w, scale, gain: nn.init.normal_(w, std=gain / math.sqrt(w.size(1))),
    "xavier": lambda w, scale, gain: nn.init.xavier_normal_(w),
    "uniform": lambda w, scale, gain: nn.init.uniform_(w, -scale, scale),
}


def capped_logits(hidden, head, cap):
    """The logits z or, in float32, cap * tanh(z / cap)."""
    logits = F.linear(hidden, head)
    return logits if cap is None else cap * torch.tanh(norms.upcast(logits) / cap)


def summed_loss(hidden, targets, head, cap):
    """Hidden states (N, C), targets (N) and the head's weights (V, C) -> the sum of the tokens'
    cross-entropies, in float32. Targets of -1 do not count.

    Compiled, it does not store logits in float32, which takes long if V is large.
    """
    logits = capped_logits(hidden, head, cap).float()
    return F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")


@torch.no_grad()
def evaluate(model, batches, world=1):
    """Mean loss per token over the batches of all ranks, see data.eval_batches.

    The result does not depend on the batch size or the number of ranks. loss_chunk bounds memory.
    """
    training, sums = model.training, []
    model.eval()
    for x, y, *more in batches:
        count = (y >= 0).sum()
        sums.append(torch.stack([model(x, y, *more)[1], count]))
    model.train(training)
    means, counts = torch.stack(sums).cpu().double().unbind(1)
    total = torch.stack([(means * counts).sum(), counts.sum()])
    if world > 1:
        total = total.to(x.device)
        torch.distributed.all_reduce(total)
    return float(total[0] / total[1])
