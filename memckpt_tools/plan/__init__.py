"""``memckpt plan``: settings for a job that is to come, from a description, this machine or a running job."""
