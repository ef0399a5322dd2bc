--[[
plexrl.lua - PlexRL's part of the site's job_submit.lua (three lines there: see job_submit.lua.example).

A job that carries `--plexrl-pool` is rewritten so that it asks Slurm for CPUs and the pool's licence and for no GPU;
what it asked for is remembered in AdminComment, the one field that users cannot edit: PXL1:{"pool":..,"gres":..,"gpus":..}.
It fails closed: whatever cannot be handled, an error in this file included, rejects jobs that carry the option and
lets all others pass. Lua 5.1 to 5.4; runs under slurmctld's locks, so it does no I/O.

SPDX-License-Identifier: Apache-2.0
]]

local POOL_NAME = "^[a-z][a-z0-9_-]*$"
local MARK = "PXL1:"
local UNSET16, UNSET32 = 65534, 4294967294 -- Slurm's NO_VAL16 and NO_VAL
local CRON_JOB = 2 ^ 22

local function say(text)
	slurm.log_user("%s", "plexrl: " .. text)
end

-- A refusal travels as a table through error(), so that pcall can tell it from a fault in this file.
local function refuse(text)
	error({ refusal = text }, 0)
end

local function given(text)
	return text ~= nil and text ~= ""
end

-- Numbers of a job description that the user did not set hold NO_VAL of the field's width.
local function number(value)
	if value == nil or value == UNSET16 or value == UNSET32 then
		return nil
	end
	return value
end

-- The pool that this job asks for; what SPANK hands over is a 0-based array. "" when the entries disagree.
local function asked_pool(job)
	local pool
	for _, entry in pairs(job.spank_job_env or {}) do
		local name = entry:match("^PLEXRL_POOL=(.*)$") or entry:match("^_SLURM_SPANK_OPTION_plexrl_plexrl_pool=(.*)$")
		if name and pool and name ~= pool then
			return ""
		end
		pool = name or pool
	end
	return pool
end

-- Splits "gres:gpu:2,lscratch:10" into what asks for GPUs and the rest: both lists of entries without a prefix.
local function split_gres(text)
	local gpus, rest = {}, {}
	for entry in (text or ""):gmatch("[^,]+") do
		local bare = entry:gsub("^%s*gres[:/]", "")
		local name = (bare:match("^%s*([^:=/%s]+)") or ""):lower()
		if name == "mps" or name == "shard" then
			refuse("a share of a GPU (--gres=" .. bare .. ") cannot be asked for together with --plexrl-pool. Remove it")
		end
		table.insert(name == "gpu" and gpus or rest, bare)
	end
	return gpus, rest
end

-- "gpu", "gpu:2", "gpu:h100:2", "gpu:h100=2": how many.
local function count(entries)
	local sum = 0
	for _, entry in ipairs(entries) do
		sum = sum + (tonumber(entry:match("[:=](%d+)[^:=]*$")) or 1)
	end
	return sum
end

-- Puts what remains back in the spelling it came in.
local function joined(text, rest)
	local prefix = text:match("^%s*(gres[:/])") or ""
	for i, entry in ipairs(rest) do
		rest[i] = prefix .. entry
	end
	return table.concat(rest, ",")
end

local function mentions_gpu(text)
	return given(text) and text:find("gpu", 1, true) ~= nil
end

-- Spellings and doors that are not handled yet are refused, never let through: field, test, what to write instead.
local function refuse_unhandled(job)
	if not given(job.script) then
		refuse("only batch jobs can attach to a pool. Submit a script with sbatch; srun inside it is attached as it is")
	end
	if given(job.array_inx) then
		refuse("job arrays cannot attach to a pool yet. Submit each element by itself, without --array")
	end
	if number(job.pack_job_offset) or number(job.het_job_offset) then
		refuse("heterogeneous jobs cannot attach to a pool. Submit the part that drives the training by itself")
	end
	if job.cron_job == true or math.floor((number(job.bitflags) or 0) / CRON_JOB) % 2 == 1 then
		refuse("scrontab jobs cannot attach to a pool. Submit the script with sbatch")
	end
	if number(job.shared) and job.shared ~= 1 then
		refuse("--exclusive is of no use to a job that holds no GPU. Remove it")
	end
	local instead = " cannot be used together with --plexrl-pool. Use --gres=gpu:N, --gpus-per-node=N, --gpus=N, or none"
	if given(job.tres_per_socket) then
		refuse("--gpus-per-socket" .. instead)
	end
	if mentions_gpu(job.tres_per_task) or (job.tres_per_task or ""):find("gres", 1, true) then
		refuse("--gpus-per-task or --tres-per-task with a GPU" .. instead)
	end
	if given(job.cpus_per_tres) then
		refuse("--cpus-per-gpu" .. instead .. ", and --cpus-per-task")
	end
	if given(job.mem_per_tres) then
		refuse("--mem-per-gpu" .. instead .. ", and --mem")
	end
	if number(job.ntasks_per_tres) or number(job.ntasks_per_gpu) then
		refuse("--ntasks-per-gpu" .. instead .. ", and --ntasks")
	end
	if mentions_gpu(job.tres_bind) or mentions_gpu(job.tres_freq) then
		refuse("--gpu-bind and --gpu-freq" .. instead)
	end
end

-- Takes the GPUs out of the request. Assigning nil would drop the rest of the script on 22.05: "" is nothing.
local function strip_gpus(job)
	local nodes = number(job.min_nodes) or 1
	local per_node, node_rest = split_gres(job.tres_per_node)
	local per_job, job_rest = split_gres(job.tres_per_job)
	if #per_node > 0 then
		job.tres_per_node = joined(job.tres_per_node, node_rest)
	end
	if #per_job > 0 then
		job.tres_per_job = joined(job.tres_per_job, job_rest)
	end
	local asked = {}
	for _, entry in ipairs(per_node) do
		table.insert(asked, entry)
	end
	for _, entry in ipairs(per_job) do
		table.insert(asked, entry)
	end
	-- --gpus beside --gpus-per-node says the same GPUs twice.
	return table.concat(asked, ","), math.max(count(per_node) * nodes, count(per_job))
end

-- One node: the job drives, it does not compute. Its share of tasks and CPUs per node stays, also in what sbatch
-- exported for a plain srun to read.
local function one_node(job)
	local nodes = number(job.min_nodes) or 1
	if nodes > 1 then
		say(string.format("%d nodes were asked for; the job runs on 1, the pool has the GPUs", nodes))
		for _, field in ipairs({ "num_tasks", "min_cpus" }) do
			if number(job[field]) then
				job[field] = math.ceil(job[field] / nodes)
			end
		end
		for _, name in ipairs({ "SLURM_NTASKS", "SLURM_NPROCS" }) do
			local exported = tonumber(job.environment[name])
			if exported then
				job.environment[name] = string.format("%d", math.ceil(exported / nodes))
			end
		end
	end
	job.min_nodes = 1
	job.max_nodes = 1
end

local function add_licence(job, pool)
	local mine, others = string.format("plexrl_%s:1", pool), job.licenses
	if not given(others) then
		job.licenses = mine
		return
	end
	if others:find("|", 1, true) then
		refuse("a choice of licences (" .. others .. ") cannot be joined with the pool's. Ask for one of them with -L")
	end
	job.licenses = others .. (others:find(";", 1, true) and ";" or ",") .. mine
end

local function quoted(text)
	return '"' .. text:gsub('[%c"\\]', "_") .. '"'
end

local function remember(job, pool, gres, gpus)
	local note = string.format('%s{"pool":%s,"gres":%s,"gpus":%d}', MARK, quoted(pool), quoted(gres), gpus)
	job.admin_comment = given(job.admin_comment) and (job.admin_comment .. " " .. note) or note
end

-- Until the hook on the node says where the pool is, the job's programs have an address where nobody listens: on a node
-- without the plugin they would otherwise go to a public endpoint with the user's own key.
local function point_nowhere(job)
	for _, kind in ipairs({ "TINKER", "OPENAI" }) do
		job.environment[kind .. "_BASE_URL"] = "http://127.0.0.1:9/not-attached-to-a-plexrl-pool"
		job.environment[kind .. "_API_KEY"] = "tml-not-attached"
	end
end

-- The site's small table: what a GPU script says, and what that is for a job that needs CPUs only.
-- { partition = {gpu = "cpu", ["*"] = "cpu"}, features = {h100 = ""}, qos = {..}, reservation = {..}, memory_mib = 16384 }
local function map_fields(job, map)
	for _, field in ipairs({ "partition", "features", "qos", "reservation" }) do
		local table_of, now = map[field], job[field]
		local new = table_of and (table_of[now or ""] or table_of["*"])
		if new and new ~= (now or "") then
			job[field] = new
		end
	end
	local cap, memory = map.memory_mib, job.min_mem_per_node
	if cap and type(memory) == "number" and memory > cap then
		say(string.format("%d MiB of memory were asked for; a job that attaches to a pool gets %d", memory, cap))
		job.min_mem_per_node = cap
	end
end

-- What a job must not carry that did not come through the option: it would pass for an attached one.
local function refuse_pretence(job, submit_uid)
	if submit_uid ~= 0 and given(job.admin_comment) and job.admin_comment:find(MARK, 1, true) then
		refuse("AdminComment " .. MARK .. " is PlexRL's own. Ask for a pool with sbatch --plexrl-pool=NAME")
	end
	if submit_uid ~= 0 and given(job.licenses) and job.licenses:find("plexrl_", 1, true) then
		refuse("the licence of a pool comes with sbatch --plexrl-pool=NAME. Do not ask for it with -L")
	end
	if given(job.script) and job.environment then
		for _, name in ipairs({ "SLURM_SPANK_PLEXRL_POOL", "_SLURM_SPANK_OPTION_plexrl_plexrl_pool" }) do
			if given(job.environment[name]) then
				refuse(name .. " in the environment does not attach a job (slurmrestd has no such option). "
					.. "Submit with sbatch --plexrl-pool=NAME, or unset it")
			end
		end
	end
end

local function submit(job, submit_uid, map)
	local pool = asked_pool(job)
	if not pool then
		refuse_pretence(job, submit_uid)
		return
	end
	if #pool > 32 or not pool:match(POOL_NAME) then
		refuse("invalid pool name. It must match ^[a-z][a-z0-9_-]{0,31}$")
	end
	if given(job.admin_comment) and job.admin_comment:find(MARK, 1, true) then
		refuse("AdminComment " .. MARK .. " is PlexRL's own. Remove it from the request")
	end
	if given(job.licenses) and job.licenses:find("plexrl_", 1, true) then
		refuse("the licence of a pool comes with --plexrl-pool=NAME. Remove it from -L")
	end
	refuse_unhandled(job)
	local gres, gpus = strip_gpus(job)
	one_node(job)
	map_fields(job, map or {})
	add_licence(job, pool)
	point_nowhere(job)
	remember(job, pool, gres, gpus)
end

local function attached(record)
	return given(record.admin_comment) and record.admin_comment:find(MARK, 1, true) ~= nil
end

local function modify(job, record, modify_uid)
	if modify_uid == 0 or not attached(record) then
		return
	end
	for _, field in ipairs({ "tres_per_node", "tres_per_job", "tres_per_socket", "tres_per_task", "cpus_per_tres",
		"mem_per_tres", "licenses", "admin_comment" }) do
		if job[field] ~= nil then -- "" takes something away, which is a change too
			refuse("GPUs, licences and the pool of an attached job cannot be changed. Cancel it and submit it anew")
		end
	end
	if number(job.ntasks_per_tres) then
		refuse("an attached job holds no GPU and cannot be given any. Cancel it and submit it anew")
	end
end

-- Runs one of the two hooks; an error in it rejects what concerns a pool and lets all else pass.
local function guarded(concerns, hook, ...)
	local ok, fault = pcall(hook, ...)
	if ok then
		return slurm.SUCCESS
	end
	if type(fault) == "table" and fault.refusal then
		say(fault.refusal)
		return slurm.ERROR
	end
	slurm.log_error("%s", "plexrl.lua: " .. tostring(fault))
	local sure, concerned = pcall(concerns)
	if sure and not concerned then
		return slurm.SUCCESS
	end
	say("the site's PlexRL module failed, so the job was not accepted. Ask the site's admin")
	return slurm.ERROR
end

local plexrl = {}

-- For slurm_job_submit. map: optional, see map_fields. Returns slurm.SUCCESS to go on, slurm.ERROR to reject.
function plexrl.submit(job, part_list, submit_uid, map)
	return guarded(function() return asked_pool(job) end, submit, job, submit_uid, map)
end

-- For slurm_job_modify.
function plexrl.modify(job, record, part_list, modify_uid)
	return guarded(function() return attached(record) end, modify, job, record, modify_uid)
end

return plexrl
