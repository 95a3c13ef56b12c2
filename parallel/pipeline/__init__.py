"""Pipeline parallelism: layers sharded over the mesh axis `stage`, rows sent through the stages in microbatches."""
