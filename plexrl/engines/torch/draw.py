"""Drawing tokens from logits."""

from __future__ import annotations

import torch
from torch import Tensor

from plexrl.engines.torch.asample import Params, Sequence


def draw(logits: Tensor, sequences: list[Sequence]) -> None:
    """Append one token to each sequence; logits: (sequences, vocabulary), float32.

    The logprob is log softmax of the logits as the model gave them, whatever temperature, top_k and top_p did to the
    draw: what teacher forcing computes, and what importance sampling corrects by. Logits that are not finite give a
    logprob that is not finite; the caller looks.
    """
    norm = torch.logsumexp(logits, -1, keepdim=True)
    params = [sequence.request.params for sequence in sequences]
    if all(p.plain for p in params):
        picked = _pick((logits - norm).exp_(), sequences)
    else:
        picked = torch.empty(len(sequences), dtype=torch.int64, device=logits.device)
        greedy = [i for i, p in enumerate(params) if p.temperature == 0]
        drawn = [i for i, p in enumerate(params) if p.temperature > 0]
        if greedy:
            picked[greedy] = logits[greedy].argmax(-1)
        if drawn:
            # Below this a quotient overflows; it is the limit of temperature 0 long before.
            heat = torch.tensor([max(params[i].temperature, 1e-30) for i in drawn], device=logits.device)
            probabilities = torch.softmax(logits[drawn] / heat[:, None], -1)
            for row, i in zip(probabilities, drawn, strict=True):
                _truncate(row, params[i])
            picked[drawn] = _pick(probabilities, [sequences[i] for i in drawn])
    logprobs = logits.gather(1, picked[:, None]) - norm
    for sequence, token, logprob in zip(sequences, picked.tolist(), logprobs[:, 0].tolist(), strict=True):
        sequence.tokens.append(token)
        sequence.logprobs.append(logprob)
    _keep_top(logits, norm, sequences)


def _pick(probabilities: Tensor, sequences: list[Sequence]) -> Tensor:
    """One uniform number per sequence from its own generator, looked up in the running sum.

    Generators live on the host whatever the device is: their state goes with a sequence to another replica.
    """
    sums = probabilities.cumsum(-1)
    uniform = torch.cat([torch.rand(1, generator=s.generator) for s in sequences])[:, None].to(sums.device)
    picked = torch.searchsorted(sums, uniform * sums[:, -1:], right=True)[:, 0]
    # Rounding may put the number at the very end, beyond the last token that has any probability.
    beyond = picked >= probabilities.shape[-1]
    return torch.where(beyond, probabilities.argmax(-1), picked) if beyond.any() else picked


def _truncate(row: Tensor, params: Params) -> None:
    """Zero what top_k and then top_p leave out, in place; what remains need not sum to one."""
    if params.top_k == 0 and params.top_p == 1:
        return
    values, order = row.sort(descending=True, stable=True)
    keep = torch.ones_like(values, dtype=torch.bool)
    if params.top_k:
        keep[params.top_k :] = False
        values = values * keep / values[: params.top_k].sum()
    if params.top_p < 1:
        # The smallest set of likeliest tokens whose sum reaches top_p.
        keep &= values.cumsum(-1) - values < params.top_p
    row[order[~keep]] = 0


def _keep_top(logits: Tensor, norm: Tensor, sequences: list[Sequence]) -> None:
    for row, lse, sequence in zip(logits, norm, sequences, strict=True):
        if sequence.request.asked.topk_sample:
            values, ids = (row - lse).topk(sequence.request.asked.topk_sample)
            sequence.top.append((ids.cpu().numpy(), values.cpu().numpy()))
