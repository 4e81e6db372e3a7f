# The runs of docs/results/search.md, in this order, one thread each. Seeds are the configs': 0.
export OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1
expert="--data.validation.engine sorl_lightning.rollout.engines.ExpertEngine"
held_out="--data.validation.max_tasks 40"
once="--config sorl:search_imitation $held_out --trainer.limit_val_batches 1 --hf_export.folder null"
of() { echo "--model.policy sorl_lightning.models.Pretrained --model.policy.init_args.path runs/$1/policy"; }

# Imitation: the student, then the whole model, which will be its teacher.
sorl fit --config sorl:search_imitation $expert $held_out --trainer.limit_val_batches 1 --trainer.check_val_every_n_epoch 2
sorl fit --config sorl:search_teacher
sorl validate $once $expert --trainer.default_root_dir runs/validate_student_start_nll
sorl validate $once --model.policy.init_args.layers null $expert --trainer.default_root_dir runs/validate_smollm2_nll
sorl validate $once $(of search_teacher) $expert --trainer.default_root_dir runs/validate_teacher_nll
sorl validate $once $(of search_teacher) --trainer.default_root_dir runs/validate_teacher
sorl validate $once $(of search_imitation) --trainer.default_root_dir runs/validate_student

# The student's at another learning rate, stopped after 32 updates.
sorl fit --config sorl:search_imitation $expert $held_out --trainer.limit_val_batches 1 --trainer.check_val_every_n_epoch 2 \
  --model.optimizer.init_args.lr 4e-4 --model.lr_scheduler.init_args.max_lr 4e-4 --model.lr_scheduler.init_args.pct_start 0.05 \
  --hf_export.folder null --trainer.default_root_dir runs/search_imitation_4e-4

# TurnOPD, and the same with twice the learning rate, which was stopped after 32 updates.
sorl validate --config sorl:search_opd $held_out --trainer.default_root_dir runs/validate_student_kl
sorl fit --config sorl:search_opd $held_out --config sorl:rollout_depth_controller --config sorl:kl_schedule_transition \
  --hf_export.folder runs/search_opd/policy
for student in search_imitation search_opd; do
  python docs/results/search/by_validity.py runs/$student/policy runs/search_teacher/policy docs/results/search/by_validity_$student.json
done
sorl fit --config sorl:search_opd $held_out --config sorl:rollout_depth_controller --config sorl:kl_schedule_transition \
  --model.optimizer.init_args.lr 3e-4 --trainer.max_epochs 32 --trainer.check_val_every_n_epoch 8 --trainer.default_root_dir runs/search_opd_3e-4

# SO-GRPO on 32 questions that the student has imitated six times over before.
few="--data.environment.init_args.max_tasks 32"
sorl fit --config sorl:search_imitation $few --data.tasks_per_collection 32 --data.mini_batches 8 --trainer.max_epochs 6 $(of search_imitation) \
  --model.lr_scheduler null --model.optimizer.init_args.lr 5e-4 --hf_export.folder runs/search_by_heart/policy --trainer.default_root_dir runs/search_by_heart
sorl fit --config sorl:search --config sorl:clipping_triggered_normalization $few --model.policy.init_args.path runs/search_by_heart/policy --warm_start null \
  --data.mini_batches 4 --model.optimizer.init_args.lr 5e-5 --trainer.max_epochs 24 --trainer.limit_val_batches 0 --trainer.default_root_dir runs/so_grpo

python docs/results/search/figures.py runs
