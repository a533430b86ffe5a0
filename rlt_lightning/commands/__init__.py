"""Commands of `rlt` besides those of LightningCLI, a file each."""
