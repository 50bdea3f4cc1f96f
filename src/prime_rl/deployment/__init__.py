"""Past one machine: files with which Slurm, Ray or Kubernetes start the commands of a run, each where it belongs."""
