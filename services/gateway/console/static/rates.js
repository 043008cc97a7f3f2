// Rates and percentiles between two looks at ever-growing counts.

/** The q-quantile of a histogram that grew from `before` to `after`; null without observations. */
export function quantile(before, after, q) {
  const grown = after.map(([bound, value], place) => [bound, value - (before[place]?.[1] ?? 0)]);
  const total = grown.at(-1)?.[1] ?? 0;
  if (total <= 0) return null;
  let [low, under] = [0, 0];
  for (const [bound, upTo] of grown) {
    if (upTo >= q * total) {
      if (bound === null) return low;
      return low + (bound - low) * (q * total - under) / Math.max(upTo - under, 1e-9);
    }
    [low, under] = [bound, upTo];
  }
  return low;
}

/** What happened a second between two states, smoothed over the looks that are remembered. */
export class Rates {
  constructor(overS) {
    this.overS = overS;
    this.looks = [];
  }

  add(timeS, totals) {
    const last = this.looks.at(-1);
    if (last && totals.completion_tokens < last.totals.completion_tokens) this.looks = [];
    this.looks.push({ timeS, totals });
    while (this.looks.length > 2 && this.looks[1].timeS <= timeS - this.overS) this.looks.shift();
    const first = this.looks[0];
    const seconds = Math.max(timeS - first.timeS, 1e-3);
    const rate = (name) => (totals[name] - first.totals[name]) / seconds;
    const at = (q) => quantile(first.totals.first_token_s, totals.first_token_s, q);
    return {
      tokens: rate("completion_tokens"), prompts: rate("prompt_tokens"),
      requests: rate("requests"), p50: at(0.5), p95: at(0.95),
    };
  }
}
