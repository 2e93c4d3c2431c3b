"""The JSON sections, one file each; the texts under the fields also go to `configs/schema.json`."""
