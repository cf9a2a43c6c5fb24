"""Fine-tuning a model so that it tolerates reuse: a differentiable form of both kinds of state."""
