"""What the next step computes: admission, order, preemption. No torch."""
