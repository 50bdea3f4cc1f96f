"""Context distillation: teacher, contexts, baseline evaluation."""
