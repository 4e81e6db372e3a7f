# The runs of docs/results/search.md, one thread each; the time limits are minutes and seconds of wall clock.
export OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1
sorl fit --config sorl:search_imitation --data.mini_batches 32 --model.optimizer.init_args.lr 1e-3 --trainer.max_epochs 20 --trainer.max_time 00:00:09:00
sorl fit --config sorl:search_imitation --model.policy.init_args.layers null --data.tasks_per_collection 16 --data.mini_batches 8 \
  --trainer.max_epochs 4 --model.optimizer.init_args.lr 2e-4 --hf_export.folder null --trainer.default_root_dir runs/search_imitation_135m --trainer.max_time 00:00:12:00
sorl fit --config sorl:search --config sorl:clipping_triggered_normalization --data.tasks_per_collection 2 --trainer.max_time 00:00:06:00 --trainer.limit_val_batches 0
