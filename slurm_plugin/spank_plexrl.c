/*
 * spank_plexrl.c - the door of PlexRL: `sbatch --plexrl-pool=NAME`.
 *
 * In sbatch it checks the name against the registry and records the option for slurmctld (plexrl.lua). On the node it
 * acts once per job, in the batch step's task 0 under the user's uid: it runs the root-owned attach helper, puts what
 * the helper prints into the job's environment, and ends the task with 78 if anything is amiss. It fails closed: a job
 * that asked for a pool never runs unattached. Under `optional` Slurm ignores return codes, so every refusal ends
 * the process itself; README.md says why sites should write `required`. Slurm 22.05 to 26.05, one build per major.minor.
 *
 * plugstack.conf:  required spank_plexrl.so registry=DIR helper=PATH pool_uids=UID[,UID..] [munge_socket=PATH] [deadline=SECONDS]
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <slurm/slurm.h>
#include <slurm/slurm_errno.h>
#include <slurm/spank.h>

SPANK_PLUGIN(plexrl, 1);

#if SLURM_VERSION_NUMBER >= SLURM_VERSION_NUM(25, 5, 0)
int slurm_spank_init_failure_mode = ESPANK_JOB_FAILURE;	/* never drain a node for our sake */
#endif

#define REFUSED 78		/* EX_CONFIG */
#define NAME_MAX_LEN 32
#define MAX_UIDS 64
#define OUTPUT_MAX 16384	/* bytes of KEY=VALUE lines */
#define LIFELINE_FD 3		/* the read end's number in the helper */
#define GRACE_S 5		/* the helper keeps its own deadline; ours is this much later */
#define ATTACHED "SLURM_PLEXRL_JOB"	/* marker: the job id that was attached; survives --export=NONE */
#define COPY "SLURM_PLEXRL_ENV_"	/* prefix of copies that steps under --export=NONE restore from */
#define STALENESS "PLEXRL_MAX_STALENESS"	/* the one variable of the job's own that the helper reads */
#define ASKED "SLURM_SPANK_PLEXRL_POOL"	/* what spank_job_control_setenv becomes on the node */
#define OPTION_ENV "_SLURM_SPANK_OPTION_plexrl_plexrl_pool"	/* how the option itself travels, in two spellings */

static struct {
	const char *registry;
	const char *helper;
	const char *munge_socket;
	const char *uids_text;
	uid_t uids[MAX_UIDS];
	int uid_count;
	int deadline;
	const char *error;	/* why the site's plugstack line cannot be used; told to those who use the option */
} site = { .uids_text = "", .deadline = 45 };

static char *asked;		/* the option's argument; the last one wins, so the command line beats #SBATCH */
static int lifeline[2] = { -1, -1 };

/* An sbatch or srun that cannot be let through ends here, before anything is submitted. */
static void __attribute__((noreturn, format(printf, 1, 2))) stop_command(const char *format, ...)
{
	va_list ap;

	va_start(ap, format);
	fprintf(stderr, "%s: plexrl: ", program_invocation_short_name);
	vfprintf(stderr, format, ap);
	fputc('\n', stderr);
	va_end(ap);
	exit(1);
}

/* A task that cannot be attached ends here; its script is never started. stderr is the job's output by now. */
static void __attribute__((noreturn, format(printf, 1, 2))) stop_task(const char *format, ...)
{
	va_list ap;

	va_start(ap, format);
	dprintf(STDERR_FILENO, "plexrl: ");
	vdprintf(STDERR_FILENO, format, ap);
	dprintf(STDERR_FILENO, "\nplexrl: this job asked for a pool and was not started without it\n");
	va_end(ap);
	_exit(REFUSED);
}

/* ---- the plugstack line ---- */

static bool parse_uids(const char *text)
{
	site.uids_text = text;
	while (*text) {
		char *end;
		unsigned long uid;

		errno = 0;
		uid = strtoul(text, &end, 10);
		if (*text < '0' || *text > '9' || errno || uid >= (uid_t) -1 || site.uid_count == MAX_UIDS)
			return false;
		site.uids[site.uid_count++] = (uid_t) uid;
		if (*end == ',' && end[1])
			end++;
		else if (*end)
			return false;
		text = end;
	}
	return site.uid_count > 0;
}

static const char *value_of(const char *arg, const char *key)
{
	size_t len = strlen(key);

	return strncmp(arg, key, len) == 0 && arg[len] == '=' ? arg + len + 1 : NULL;
}

static void parse_site(int ac, char **av)
{
	const char *value;

	for (int i = 0; i < ac; i++) {
		if ((value = value_of(av[i], "registry"))) {
			site.registry = value;
		} else if ((value = value_of(av[i], "helper"))) {
			site.helper = value;
		} else if ((value = value_of(av[i], "munge_socket"))) {
			site.munge_socket = value;
		} else if ((value = value_of(av[i], "pool_uids"))) {
			site.uid_count = 0;
			if (!parse_uids(value))
				site.error = "pool_uids= is not a comma-separated list of numeric uids";
		} else if ((value = value_of(av[i], "deadline"))) {
			char *end;
			long seconds = strtol(value, &end, 10);

			if (end == value || *end || seconds < 1 || seconds > 600)
				site.error = "deadline= is not a number of seconds from 1 to 600";
			else
				site.deadline = (int) seconds;
		} else {
			site.error = "it has an argument that is none of registry= helper= pool_uids= munge_socket= deadline=";
		}
	}
	if (!site.error && (!site.registry || site.registry[0] != '/'))
		site.error = "registry= is not an absolute path";
	if (!site.error && (!site.helper || site.helper[0] != '/'))
		site.error = "helper= is not an absolute path";
	if (site.error)
		slurm_error("plexrl: plugstack.conf: %s", site.error);
}

/* ---- names and the registry ---- */

/* ^[a-z][a-z0-9_-]{0,31}$ ; also what keeps the name harmless as a file, licence and JSON string. */
static bool valid_name(const char *name)
{
	size_t len = strlen(name);

	if (len < 1 || len > NAME_MAX_LEN || name[0] < 'a' || name[0] > 'z')
		return false;
	return strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789_-") == len;
}

/* Root or a pool account owns it, and nobody else can write to it. */
static bool trusted(const struct stat *st)
{
	bool owned = st->st_uid == 0;

	for (int i = 0; i < site.uid_count; i++)
		owned = owned || st->st_uid == site.uids[i];
	return owned && !(st->st_mode & (S_IWGRP | S_IWOTH));
}

/* The pools declared in the registry, for a message: "demo, lab" or "none". */
static void list_pools(int dir, char *out, size_t size)
{
	DIR *stream = fdopendir(dup(dir));
	struct dirent *entry;
	size_t used = 0;

	snprintf(out, size, "none");
	while (stream && (entry = readdir(stream))) {
		char *dot = strrchr(entry->d_name, '.');
		int n;

		if (!dot || strcmp(dot, ".json"))
			continue;
		*dot = '\0';
		if (!valid_name(entry->d_name))	/* NAME.live.json */
			continue;
		n = snprintf(out + used, size - used, "%s%s", used ? ", " : "", entry->d_name);
		if (n < 0 || (size_t) n >= size - used)
			break;
		used += (size_t) n;
	}
	if (stream)
		closedir(stream);
}

static void check_declared(const char *name)
{
	char file[NAME_MAX_LEN + sizeof(".json")], pools[1024];
	struct stat st;
	int dir, fd;

	dir = open(site.registry, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (dir < 0 || fstat(dir, &st))
		stop_command("cannot open the pools' registry %s: %s. Ask the site's admin", site.registry, strerror(errno));
	if (!trusted(&st))
		stop_command("the pools' registry %s is not owned by root or a pool account, or others can write to it. "
			     "Ask the site's admin", site.registry);
	list_pools(dir, pools, sizeof(pools));
	if (!valid_name(name))
		stop_command("invalid pool name '%.64s': it must match ^[a-z][a-z0-9_-]{0,31}$. Declared pools: %s", name, pools);
	snprintf(file, sizeof(file), "%s.json", name);
	fd = openat(dir, file, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0 && errno == ENOENT)
		stop_command("there is no pool '%s'. Declared pools: %s", name, pools);
	if (fd < 0 || fstat(fd, &st))
		stop_command("cannot open %s/%s: %s. It must be a regular file, not a link. Ask the site's admin",
			     site.registry, file, strerror(errno));
	if (!S_ISREG(st.st_mode) || !trusted(&st))
		stop_command("%s/%s is not a regular file of root or a pool account, or others can write to it. "
			     "Ask the site's admin", site.registry, file);
	close(fd);
	close(dir);
}

/* ---- the option ---- */

static int on_option(int val, const char *optarg, int remote)
{
	(void) val;
	(void) remote;
	free(asked);
	asked = strdup(optarg ? optarg : "");
	return asked ? ESPANK_SUCCESS : ESPANK_ERROR;
}

int slurm_spank_init(spank_t sp, int ac, char **av)
{
	static struct spank_option option = {
		"plexrl-pool", "NAME", "attach this job to the resident pool NAME; it holds no GPU itself", 1, 0, on_option
	};
	spank_context_t context = spank_context();

	if (context != S_CTX_ALLOCATOR && context != S_CTX_LOCAL && context != S_CTX_REMOTE)
		return ESPANK_SUCCESS;
	parse_site(ac, av);
	return spank_option_register(sp, &option);
}

/* sbatch and salloc: declared or not at all. srun: only inside a job that is attached to that pool. */
int slurm_spank_init_post_opt(spank_t sp, int ac, char **av)
{
	spank_context_t context = spank_context();

	(void) ac;
	(void) av;
	if (!asked || (context != S_CTX_ALLOCATOR && context != S_CTX_LOCAL))
		return ESPANK_SUCCESS;
	if (site.error)
		stop_command("plugstack.conf of this host: %s. Ask the site's admin", site.error);
	check_declared(asked);
	if (context == S_CTX_LOCAL) {
		const char *job = getenv("SLURM_JOB_ID"), *attached = getenv(ATTACHED), *pool = getenv("SLURM_PLEXRL_POOL");

		if (!job || !attached || strcmp(job, attached) || !pool || strcmp(pool, asked))
			stop_command("srun cannot attach to pool '%s' by itself. Submit a script with "
				     "sbatch --plexrl-pool=%s; srun inside it is attached as it is", asked, asked);
		return ESPANK_SUCCESS;
	}
	if (spank_job_control_setenv(sp, "PLEXRL_POOL", asked, 1) != ESPANK_SUCCESS)
		stop_command("Slurm does not take the option --plexrl-pool; nothing was submitted. Ask the site's admin");
	unsetenv("SLURM_RESTART_COUNT");	/* of a job that this sbatch runs in, not of the new one */
	return ESPANK_SUCCESS;
}

/* ---- on the node ---- */

/* Variables by which sbatch hands the original GPU request on, or slurmd a device: srun would ask for them again. */
static const char *const gpu_variables[] = {
	"SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_PER_SOCKET", "SLURM_GPUS_ON_NODE",
	"SLURM_NTASKS_PER_GPU", "SLURM_CPUS_PER_GPU", "SLURM_MEM_PER_GPU", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND",
	"SLURM_GPU_FREQ", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_JOB_GRES", "SLURM_STEP_GRES", "GPU_DEVICE_ORDINAL",
};

/* Without an allocation of its own a program would see every GPU of the node. */
static void hide_gpus(spank_t sp)
{
	for (size_t i = 0; i < sizeof(gpu_variables) / sizeof(*gpu_variables); i++)
		spank_unsetenv(sp, gpu_variables[i]);
	if (spank_setenv(sp, "CUDA_VISIBLE_DEVICES", "", 1) != ESPANK_SUCCESS ||
	    spank_setenv(sp, "ROCR_VISIBLE_DEVICES", "", 1) != ESPANK_SUCCESS)
		stop_task("cannot hide the node's GPUs from the job");
}

static void check_helper(void)
{
	struct stat st;
	const char *slash = strrchr(site.helper, '/');
	char dir[4096];

	snprintf(dir, sizeof(dir), "%.*s", slash == site.helper ? 1 : (int) (slash - site.helper), site.helper);
	if (stat(dir, &st) || st.st_uid != 0 || (st.st_mode & (S_IWGRP | S_IWOTH)))
		stop_task("the folder of the attach helper %s is missing, not root's, or others can write to it", site.helper);
	if (lstat(site.helper, &st))
		stop_task("the attach helper %s is not there: %s", site.helper, strerror(errno));
	if (!S_ISREG(st.st_mode) || st.st_uid != 0 || (st.st_mode & (S_IWGRP | S_IWOTH)))
		stop_task("the attach helper %s is not a regular file of root's that only root can write to", site.helper);
}

/* The child gets its three streams and the lifeline; whatever else slurmstepd had open, it does not. */
static int only_these(posix_spawn_file_actions_t *actions, int life, int out)
{
	int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
	DIR *fds = opendir("/proc/self/fd");
	struct dirent *entry;
	int rc;

	if (null < 0 || !fds)
		return errno;
	if ((rc = posix_spawn_file_actions_adddup2(actions, null, STDIN_FILENO)) ||
	    (rc = posix_spawn_file_actions_adddup2(actions, out, STDOUT_FILENO)) ||
	    (rc = posix_spawn_file_actions_adddup2(actions, life, LIFELINE_FD)))
		return rc;
	while ((entry = readdir(fds))) {
		int fd = atoi(entry->d_name);

		if (fd > LIFELINE_FD && (rc = posix_spawn_file_actions_addclose(actions, fd)))
			return rc;
	}
	closedir(fds);	/* `null` stays open until the task's exec */
	return 0;
}

/* A pipe whose ends are above the numbers that the child gets, and are closed by exec. */
static int high_pipe(int ends[2])
{
	int low[2];

	if (pipe2(low, O_CLOEXEC))
		return -1;
	ends[0] = fcntl(low[0], F_DUPFD_CLOEXEC, 20);
	ends[1] = fcntl(low[1], F_DUPFD_CLOEXEC, 20);
	close(low[0]);
	close(low[1]);
	return ends[0] < 0 || ends[1] < 0 ? -1 : 0;
}

/* staleness: STALENESS=N as the job was submitted with it, or "". */
static pid_t spawn_helper(const char *pool, uint32_t job, uint32_t restart, char *staleness, int out)
{
	char fd_text[16], deadline[16], job_text[48], restart_text[48];
	char *argv[16], *envp[] = { job_text, restart_text, "PATH=/usr/bin:/bin", "LANG=C.UTF-8",
				    *staleness ? staleness : NULL, NULL };
	posix_spawn_file_actions_t actions;
	posix_spawnattr_t attr;
	sigset_t none, all;
	pid_t pid;
	int n = 0, rc;

	snprintf(fd_text, sizeof(fd_text), "%d", LIFELINE_FD);
	snprintf(deadline, sizeof(deadline), "%d", site.deadline);
	snprintf(job_text, sizeof(job_text), "SLURM_JOB_ID=%u", job);
	snprintf(restart_text, sizeof(restart_text), "SLURM_RESTART_COUNT=%u", restart);
	argv[n++] = (char *) site.helper;
	argv[n++] = "--registry";
	argv[n++] = (char *) site.registry;
	argv[n++] = "--pool";
	argv[n++] = (char *) pool;
	if (site.uid_count) {
		argv[n++] = "--pool-uids";
		argv[n++] = (char *) site.uids_text;
	}
	if (site.munge_socket) {
		argv[n++] = "--munge-socket";
		argv[n++] = (char *) site.munge_socket;
	}
	argv[n++] = "--lifeline";
	argv[n++] = fd_text;
	argv[n++] = "--deadline";
	argv[n++] = deadline;
	argv[n] = NULL;

	sigemptyset(&none);
	sigfillset(&all);
	if ((rc = posix_spawn_file_actions_init(&actions)) || (rc = posix_spawnattr_init(&attr)) ||
	    (rc = posix_spawnattr_setsigmask(&attr, &none)) || (rc = posix_spawnattr_setsigdefault(&attr, &all)) ||
	    (rc = posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF)) ||
	    (rc = only_these(&actions, lifeline[0], out)) ||
	    (rc = posix_spawn(&pid, site.helper, &actions, &attr, argv, envp)))
		stop_task("cannot start the attach helper %s: %s", site.helper, strerror(rc));
	return pid;
}

static int ms_until(const struct timespec *end)
{
	struct timespec now;
	long ms;

	clock_gettime(CLOCK_MONOTONIC, &now);
	ms = (end->tv_sec - now.tv_sec) * 1000 + (end->tv_nsec - now.tv_nsec) / 1000000;
	return ms > 0 ? (int) ms : 0;
}

static void __attribute__((noreturn)) give_up(pid_t pid, const char *why)
{
	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
	stop_task("the attach helper %s", why);	/* our end cuts the lifeline, and so ends a proxy it may have left */
}

/* Reads all that the helper prints and its good end, or does not return. */
static void hear_helper(pid_t pid, int out, char *text)
{
	struct pollfd wait = { .fd = out, .events = POLLIN };
	struct timespec end;
	size_t used = 0;
	ssize_t n = 1;
	int status;

	clock_gettime(CLOCK_MONOTONIC, &end);
	end.tv_sec += site.deadline + GRACE_S;
	while (n) {
		int ready = poll(&wait, 1, ms_until(&end));

		if (ready == 0)
			give_up(pid, "did not answer in time");
		if (ready < 0 && errno == EINTR)
			continue;
		n = ready < 0 ? -1 : read(out, text + used, OUTPUT_MAX - used);
		if (n < 0 && errno != EINTR)
			give_up(pid, "could not be read");
		used += n > 0 ? (size_t) n : 0;
		if (used == OUTPUT_MAX)
			give_up(pid, "said more than it should");
	}
	text[used] = '\0';
	if (strlen(text) != used)
		give_up(pid, "printed what is not text");
	for (;;) {
		pid_t ended = waitpid(pid, &status, WNOHANG);

		if (ended == pid)
			break;
		if (ended < 0 && errno != EINTR)
			stop_task("the attach helper's end could not be seen: %s", strerror(errno));
		if (!ms_until(&end))
			give_up(pid, "did not end in time");
		poll(NULL, 0, 5);
	}
	if (WIFSIGNALED(status))
		stop_task("the attach helper was ended by signal %d", WTERMSIG(status));
	if (WEXITSTATUS(status))
		stop_task("the attach helper ended with %d; its reason stands above", WEXITSTATUS(status));
}

/* What a program needs in order not to fall back to a public endpoint with the user's own key. */
static const char *const needed[] = { "TINKER_BASE_URL", "TINKER_API_KEY", "OPENAI_BASE_URL", "OPENAI_API_KEY",
	"SLURM_PLEXRL_POOL" };
#define NEEDED (sizeof(needed) / sizeof(*needed))

static void set_variables(spank_t sp, char *text)
{
	bool seen[NEEDED] = { false };
	char *line, *rest = text;

	if (*text && text[strlen(text) - 1] != '\n')
		stop_task("the attach helper's answer breaks off");
	while ((line = strsep(&rest, "\n")) && rest) {
		char *value = strchr(line, '=');
		size_t len = value ? (size_t) (value - line) : 0;
		char copy[sizeof(COPY) + 256];

		if (!len || len > 256 || strspn(line, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_") < len)
			stop_task("the attach helper printed a line that is not KEY=VALUE");
		*value++ = '\0';
		for (size_t i = 0; i < NEEDED; i++)
			seen[i] = seen[i] || (*value && strcmp(line, needed[i]) == 0);
		snprintf(copy, sizeof(copy), COPY "%s", line);
		if (spank_setenv(sp, line, value, 1) != ESPANK_SUCCESS || spank_setenv(sp, copy, value, 1) != ESPANK_SUCCESS)
			stop_task("cannot set %s in the job", line);
	}
	for (size_t i = 0; i < NEEDED; i++)
		if (!seen[i])
			stop_task("the attach helper did not say %s", needed[i]);
}

/* 22.05 does not fill the item in the batch step; the variable is there from the first requeue on. */
static uint32_t restart_count(spank_t sp)
{
	uint32_t count = 0;
	char text[16] = "";

	if (spank_get_item(sp, S_SLURM_RESTART_COUNT, &count) == ESPANK_SUCCESS && count)
		return count;
	if (spank_getenv(sp, "SLURM_RESTART_COUNT", text, sizeof(text)) != ESPANK_SUCCESS)
		return 0;
	return (uint32_t) strtoul(text, NULL, 10);
}

static void attach(spank_t sp, const char *pool, uint32_t job)
{
	static char text[OUTPUT_MAX + 1];
	char job_text[16], value[16], staleness[sizeof(STALENESS) + sizeof(value)] = "";
	int out[2], rc;
	pid_t pid;

	if (site.error)
		stop_task("plugstack.conf of this node: %s", site.error);
	if (!valid_name(pool))
		stop_task("invalid pool name '%.64s'", pool);
	check_helper();
	if (lifeline[0] < 0 || high_pipe(out))
		stop_task("no pipe for the attach helper: %s", strerror(errno));
	rc = spank_getenv(sp, STALENESS, value, sizeof(value));
	if (rc == ESPANK_SUCCESS)
		snprintf(staleness, sizeof(staleness), STALENESS "=%s", value);
	else if (rc != ESPANK_ENV_NOEXIST)
		stop_task("the job's variable " STALENESS " cannot be read, or is too long for a number");
	pid = spawn_helper(pool, job, restart_count(sp), staleness, out[1]);
	close(out[1]);
	hear_helper(pid, out[0], text);
	close(out[0]);
	set_variables(sp, text);

	snprintf(job_text, sizeof(job_text), "%u", job);
	if (spank_setenv(sp, ATTACHED, job_text, 1) != ESPANK_SUCCESS)
		stop_task("cannot mark the job as attached");
	/* An sbatch inside this job asks for itself. */
	spank_unsetenv(sp, ASKED);
	spank_unsetenv(sp, OPTION_ENV);
	spank_unsetenv(sp, "SLURM_SPANK_" OPTION_ENV);
	hide_gpus(sp);
}

/* A step of an attached job: --export=NONE or a list loses what the script has; the SLURM_ copies come through. */
static void restore_variables(spank_t sp)
{
	char **env;

	if (spank_get_item(sp, S_JOB_ENV, &env) != ESPANK_SUCCESS)
		stop_task("cannot read the step's environment");
	for (size_t i = 0; env[i]; i++) {
		char *pair, *value;

		if (strncmp(env[i], COPY, strlen(COPY)))
			continue;
		pair = strdup(env[i] + strlen(COPY));
		if (!pair || !(value = strchr(pair, '=')))
			stop_task("cannot restore the pool's variables in a step");
		*value++ = '\0';
		if (spank_getenv(sp, pair, (char[1]) { 0 }, 1) == ESPANK_ENV_NOEXIST) {
			if (spank_setenv(sp, pair, value, 1) != ESPANK_SUCCESS)
				stop_task("cannot set %s in a step", pair);
			i = (size_t) -1;	/* setenv may have moved the array */
			if (spank_get_item(sp, S_JOB_ENV, &env) != ESPANK_SUCCESS)
				stop_task("cannot read the step's environment");
		}
		free(pair);
	}
}

/* The pool that this job asked for: 22.05 runs no callback here under --export=NONE, but what sbatch recorded is there. */
static const char *pool_of(spank_t sp)
{
	static char recorded[256];

	if (!asked && spank_getenv(sp, ASKED, recorded, sizeof(recorded)) != ESPANK_ENV_NOEXIST)
		return recorded;
	return asked;
}

/*
 * slurmstepd itself holds the lifeline's write end, and nobody else after the task's exec: the proxy, which has the read
 * end, lives exactly as long as the batch step, whatever the script closes (csh closes all it inherits) or leaves running.
 */
int slurm_spank_user_init(spank_t sp, int ac, char **av)
{
	uint32_t step;

	(void) ac;
	(void) av;
	if (pool_of(sp) && spank_get_item(sp, S_JOB_STEPID, &step) == ESPANK_SUCCESS && step == SLURM_BATCH_SCRIPT &&
	    high_pipe(lifeline))
		slurm_error("plexrl: no lifeline: %s", strerror(errno));	/* task_init ends the task for want of it */
	return ESPANK_SUCCESS;
}

int slurm_spank_task_exit(spank_t sp, int ac, char **av)
{
	(void) sp;
	(void) ac;
	(void) av;
	if (lifeline[1] >= 0)
		close(lifeline[1]);
	lifeline[1] = -1;
	return ESPANK_SUCCESS;
}

int slurm_spank_task_init(spank_t sp, int ac, char **av)
{
	char marker[16] = "", job_text[16];
	const char *pool = pool_of(sp);
	uint32_t job, step;

	(void) ac;
	(void) av;
	if (spank_get_item(sp, S_JOB_ID, &job) != ESPANK_SUCCESS || spank_get_item(sp, S_JOB_STEPID, &step) != ESPANK_SUCCESS) {
		if (pool)
			stop_task("Slurm does not say which job this is");
		return ESPANK_ERROR;
	}
	if (step == SLURM_BATCH_SCRIPT) {
		if (pool)
			attach(sp, pool, job);
		return ESPANK_SUCCESS;
	}
	snprintf(job_text, sizeof(job_text), "%u", job);
	if (spank_getenv(sp, ATTACHED, marker, sizeof(marker)) == ESPANK_SUCCESS && strcmp(marker, job_text) == 0) {
		restore_variables(sp);
		hide_gpus(sp);
	} else if (pool) {
		stop_task("this step's job is not attached to pool '%.64s'; submit a script with sbatch --plexrl-pool=%.64s",
			  pool, pool);
	}
	return ESPANK_SUCCESS;
}
