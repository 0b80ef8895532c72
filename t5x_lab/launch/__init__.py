"""Files that run a command on a cluster.

slices.py   TPU slices as GKE names them
jobset.py   JobSets of GKE
slurm.py    batch scripts of Slurm
hosts.py    a script for each host of any other cluster
"""
