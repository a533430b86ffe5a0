"""The commands of `rlt` that LightningCLI does not have, one file each."""
