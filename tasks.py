"""
lm-evaluation-harness on a model: the part `tasks` of eval.py. Needs pip install lm-eval.

A task asks a model for the log-probabilities of continuations, for the log-probability of a whole
text, or for text up to a stop string. A model trained here sees end-of-text before each context, as
before each document in training. An imported model sees what its own tokenizer puts there.
"""

from difflib import get_close_matches
from itertools import groupby

import torch

from data import begun, ends_text, plain_text, reason_of, start_of_text
from generate import KVCache, stream_tokens

MOST = 16  # continuations of a context in a batch: a task may have thousands of one short context
# the tasks of the papers on norms
COMMON = "arc_easy,arc_challenge,piqa,hellaswag,openbookqa,winogrande,mmlu,boolq"


def score_choices(model, pairs, batch_size, n_vocab, device):
    """Score continuations: a list of (log-probability, whether greedy decoding gives it).

    pairs are (context, continuation), two lists of token ids. A context is computed once for each
    MOST of its continuations. A batch has contexts of equal length, and the longest come first.
    """
    T = model.config.block_size
    by_context = {}  # {context: indices of its pairs}
    for i, (context, continuation) in enumerate(pairs):
        n = len(continuation)
        if not 0 < n <= T:
            raise SystemExit(f"tasks: an answer of {n} tokens does not fit into block_size={T}")
        # Cut the context from the left. The model does not read the last token of a continuation.
        by_context.setdefault(tuple(context[-(T + 1 - n) :]), []).append(i)

    results = [None] * len(pairs)
    for _, group in groupby(sorted(by_context, key=len, reverse=True), key=len):
        parts = [(context, by_context[context][at : at + MOST]) for context in group
                 for at in range(0, len(by_context[context]), MOST)]  # fmt: skip
        for first in range(0, len(parts), batch_size):
            contexts, indices = zip(*parts[first : first + batch_size])
            members = [(row, i) for row, of_row in enumerate(indices) for i in of_row]
            owner = torch.tensor([row for row, _ in members], device=device)
            continuations = [pairs[i][1] for _, i in members]
            scores = score_group(model, contexts, owner, continuations, n_vocab, device)
            for (_, i), score in zip(members, scores):
                results[i] = score
    return results


@torch.no_grad()
def score_group(model, contexts, owner, continuations, n_vocab, device):
    """Score continuations whose contexts have equal length.

    Continuation i follows contexts[owner[i]]. Returns (log-probability, greedy) for each.
    """
    longest = max(map(len, continuations))
    padded = [ids + [0] * (longest - len(ids)) for ids in continuations]
    y = torch.tensor(padded, device=device)  # (N, longest)
    cache = KVCache(model, len(contexts), len(contexts[0]) + longest - 1)
    hidden, head = model.hidden(torch.tensor(contexts, device=device), cache=cache)
    hidden = hidden[owner, -1:]  # (N, 1, C)
    if longest > 1:
        cache.kv = [[tensor[owner] for tensor in layer] for layer in cache.kv]
        cache.ids = cache.ids[owner]
        hidden = torch.cat((hidden, model.hidden(y[:, :-1], cache=cache)[0]), dim=1)

    chunk = model.loss_chunk or 2048  # tokens whose logits are in memory at a time
    parts = zip(hidden.flatten(0, 1).split(chunk), y.flatten().split(chunk))
    scores = []
    for h, targets in parts:
        logp = model.logits(h, head)[:, :n_vocab].float().log_softmax(-1)
        of_targets = logp.gather(-1, targets[:, None])[:, 0]
        scores.append((of_targets, logp.argmax(-1) == targets))
    logp, greedy = (torch.cat(part).view(y.shape) for part in zip(*scores))
    lengths = torch.tensor([[len(ids)] for ids in continuations], device=device)
    real = torch.arange(longest, device=device) < lengths  # (N, longest), False for padding
    return [*zip((logp * real).sum(-1).tolist(), (greedy | ~real).all(-1).tolist())]


def harness(model, encoding, batch_size, device):
    """Wrap the model in the interface of lm-evaluation-harness."""
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

    T, eot, start = model.config.block_size, encoding.eot_token, start_of_text(encoding)
    first, own, n_vocab = eot, [], encoding.n_vocab
    if getattr(encoding, "imported", False):  # all as in the harness's own class `hf`
        first = eot if encoding.bos_token is None else encoding.bos_token
        own, n_vocab = start, model.config.vocab_size

    class Checkpoint(TemplateLM):
        eot_token_id, prefix_token_id = eot, first

        def tok_encode(self, string, **kwargs):
            return encoding.encode_ordinary(string)

        def _loglikelihood_tokens(self, requests, **kwargs):
            pairs = []
            for _, context, continuation in requests:
                context = context[1:] if start and context == [first] else context
                cut = max(0, len(start) + len(context) + len(continuation) - 1 - T)
                pairs.append(([*start, *context[cut:]], continuation))
            return score_choices(model, pairs, batch_size, n_vocab, device)

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            totals = []
            for request in requests:
                ids = [*own, *self.tok_encode(request.args[0])]
                windows = utils.get_rolling_token_windows(ids, first, T, 1)
                pairs = [utils.make_disjoint_window(window) for window in windows]
                scores = score_choices(model, pairs, batch_size, n_vocab, device)
                totals.append(sum(total for total, _ in scores))
            return totals

        def generate_until(self, requests, disable_tqdm=False):
            asked = []
            for context, options in (request.args for request in requests):
                options = normalize_gen_kwargs(options)
                stops = handle_stop_sequences(options.pop("until"), encoding.decode([eot]))
                most, samples = options.pop("max_gen_toks"), options.pop("do_sample")
                choices = {"temperature": options.pop("temperature", 1.0)}
                choices["top_k"] = options.pop("top_k", None) or None  # 0: from all
                choices["top_p"] = options.pop("top_p", None)
                others = {k: v for k, v in options.items() if (k, v) != ("num_beams", 1)}
                if others:
                    raise SystemExit(f"tasks: a task asks for {others}, which is not supported")
                asked.append((context, stops, most, choices if samples else {"temperature": 0.0}))
            return [write_until(model, encoding, *each, device) for each in asked]

    return Checkpoint()


def write_until(model, encoding, context, stops, max_new, choices, device):
    """Continue the context up to one of the strings in stops, or up to end-of-text. The text is cut
    at each of them in turn, as by the harness's class "hf".

    choices: options of stream_tokens. Special tokens are left out of the text.
    A long context is cut from the left; at least half a window of it is kept.
    """
    size = model.config.block_size
    keep = max(size // 2, size - max_new)
    ids = begun(encoding.encode_ordinary(context)[-max(1, keep - 1) :], encoding)
    start, written = torch.tensor([ids], device=device), []
    stops = [*filter(None, stops)]
    for token in stream_tokens(model, start, max_new, n_vocab=encoding.n_vocab, **choices):
        if ends_text(int(token), encoding):
            break
        written.append(int(token))
        text = encoding.decode(written)
        if any(stop in text for stop in stops):
            break
    text = plain_text(written, encoding)
    for stop in stops:
        text = text.partition(stop)[0]
    return text


def run_tasks(model, encoding, batch_size, device, tasks, task_dir, num_fewshot, limit, seed):
    """Run lm-evaluation-harness: {task: {metric: value}}, and the versions of the packages.

    tasks: names, separated by commas; None: COMMON. The others are settings of eval.py.
    """
    try:
        import datasets
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise SystemExit(f"tasks need a package: pip install lm-eval ({error})") from None
    manager = TaskManager(include_path=task_dir, include_defaults=task_dir is None)
    names = (tasks or COMMON).split(",")
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        near = [each for name in unknown for each in get_close_matches(name, manager.all_tasks, 5)]
        near = ", ".join(near or sorted(manager.all_tasks)[:20])
        raise SystemExit(f"tasks={tasks!r}: no {', '.join(unknown)}; there is {near}")
    errors = (OSError, ValueError, RuntimeError, ImportError, datasets.exceptions.DatasetsError)
    try:
        found = lm_eval.simple_evaluate(
            harness(model, encoding, batch_size, device), tasks=names, task_manager=manager,
            num_fewshot=num_fewshot, limit=limit, bootstrap_iters=100, log_samples=False,
            random_seed=seed, numpy_random_seed=seed, torch_random_seed=seed,
            fewshot_random_seed=seed,
        )  # fmt: skip
    except errors as error:
        raise SystemExit(f"tasks: {reason_of(error)}") from error
    report = {
        name: {key: value for key, value in metrics.items() if isinstance(value, float)}
        for name, metrics in found["results"].items()
    }
    for name, metrics in report.items():
        values = [f"{key} {value:.4f}" for key, value in metrics.items()]
        print(f"{name:<20}" + "  ".join(values))
    return report | {"versions": {"lm_eval": lm_eval.__version__, "datasets": datasets.__version__}}
