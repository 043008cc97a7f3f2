"""Plans the next step: admission, order, preemption. No torch."""
