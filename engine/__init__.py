"""What is the same for every workload: recipe, plan, sampler, noise, loop, checkpoints."""
