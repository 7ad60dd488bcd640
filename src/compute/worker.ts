// Entry point of a compute thread: the tasks that it can run.
import { serveTasks } from "../kernel/compute.ts";
import { SHA256 } from "../wire/body.ts";
import { JSON_TEXT } from "../wire/json.ts";
import { RPC_MESSAGES, RPC_REQUEST } from "../wire/jsonrpc.ts";
import { EVENT_TOOLS, JSON_TOOLS, TOOLS } from "../wire/tool-list.ts";
import { SIGNATURE } from "../x402/verify.ts";

declare const self: Worker;

serveTasks(self, [RPC_REQUEST, RPC_MESSAGES, SHA256, JSON_TEXT, TOOLS, JSON_TOOLS, EVENT_TOOLS, SIGNATURE]);
