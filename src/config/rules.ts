// Rules that hold between variables, such as "must be set when the other is", for each service.
import { accessSync, constants, existsSync, statSync } from "node:fs";
import { dirname, resolve } from "node:path";
import { isKeyOf, keyMust } from "./pem.ts";
import { systemReason } from "./values.ts";
import type { CALL, COMMON, DEMO, FACILITATOR, GATEWAY, VariableRow } from "./variables.ts";

export const GATEWAY_PORT = 8080;
export const FACILITATOR_PORT = 8443;

type Table = typeof COMMON & typeof GATEWAY & typeof FACILITATOR & typeof DEMO & typeof CALL;
export type VariableName = keyof Table;
/** The values of all variables; those of the other service have their defaults, whatever is set. */
export type ConfigValues = {
  [N in VariableName]: Table[N] extends VariableRow<infer T, infer F, string> ? T | F : never;
};

export interface ConfigRule {
  /** The variable that the rule is about. The rule is skipped if this variable, or `other`, has a problem of its own. */
  readonly name: VariableName;
  readonly other: VariableName | null;
  /** Completes a sentence that begins with the name; false when there is no problem. `written` is the text of a variable. */
  readonly problem: (values: ConfigValues, written: (name: VariableName) => string) => string | false;
}

function rule(name: VariableName, other: VariableName | null, problem: ConfigRule["problem"]): ConfigRule {
  return { name, other, problem };
}

export const MODE_RULES: readonly ConfigRule[] = [
  rule("TOLLGATE_MODE", null, (v) => v.TOLLGATE_MODE === null && "must be gateway or facilitator (or give --mode)"),
];

export const COMMON_RULES: readonly ConfigRule[] = [
  rule("TOLLGATE_DATA_DIR", "DATABASE_URL", (v) => v.DATABASE_URL === null && dataDirProblem(v.TOLLGATE_DATA_DIR)),
];

const OWN_TOOLS = "must be unset: Postgres is backed up by its own tools, see tollgate help backups";
export const BACKUP_RULES: readonly ConfigRule[] = [
  rule("DATABASE_URL", null, (v) => v.DATABASE_URL !== null && OWN_TOOLS),
];

export const GATEWAY_RULES: readonly ConfigRule[] = [
  otherPort("TOLLGATE_METRICS_PORT", "TOLLGATE_PORT", GATEWAY_PORT),
  needed("TOLLGATE_MASTER_KEY", "DATABASE_URL", "must be set when DATABASE_URL is: replicas share it"),
  requires(
    "TOLLGATE_LISTEN_URL",
    "DATABASE_URL",
    "must be unset without DATABASE_URL: it is a URL of the same database",
  ),
  rule("TOLLGATE_REUSE_PORT", "DATABASE_URL", (v) => {
    const isShared = v.TOLLGATE_REUSE_PORT === "1" && v.DATABASE_URL === null;
    return isShared && "must be 0 without DATABASE_URL: only one gateway can use an SQLite database";
  }),
  ...together("TOLLGATE_OIDC_AUDIENCE", "TOLLGATE_OIDC_ISSUER"),
  requires("TOLLGATE_JWKS_URL", "TOLLGATE_OIDC_ISSUER"),
  ...together("TOLLGATE_VAULT_TOKEN", "TOLLGATE_VAULT_ADDR"),
  rule("TOLLGATE_USER_CLAIM", null, ({ TOLLGATE_USER_CLAIM: user, TOLLGATE_TENANT_CLAIM: tenant }) => {
    return user === tenant && "must differ from TOLLGATE_TENANT_CLAIM";
  }),
  rule("TOLLGATE_SCOPE_CLAIM", null, (v) => {
    const isTaken = [v.TOLLGATE_TENANT_CLAIM, v.TOLLGATE_USER_CLAIM].includes(v.TOLLGATE_SCOPE_CLAIM);
    return isTaken && "must differ from TOLLGATE_TENANT_CLAIM and TOLLGATE_USER_CLAIM";
  }),
];

export const FACILITATOR_RULES: readonly ConfigRule[] = [
  required("TOLLGATE_TLS_CERT_FILE"),
  required("TOLLGATE_TLS_KEY_FILE"),
  rule("TOLLGATE_TLS_KEY_FILE", "TOLLGATE_TLS_CERT_FILE", (v, written) => {
    const [key, certificates] = [v.TOLLGATE_TLS_KEY_FILE, v.TOLLGATE_TLS_CERT_FILE];
    if (key === null || certificates === null || isKeyOf(key, certificates)) return false;
    return keyMust(written("TOLLGATE_TLS_KEY_FILE"), written("TOLLGATE_TLS_CERT_FILE"));
  }),
  required("TOLLGATE_CLIENT_CA_FILE"),
  required("TOLLGATE_RPC_URLS"),
  otherPort("TOLLGATE_OPEN_PORT", "TOLLGATE_PORT", FACILITATOR_PORT),
  otherPort("TOLLGATE_METRICS_PORT", "TOLLGATE_PORT", FACILITATOR_PORT),
  otherPort("TOLLGATE_METRICS_PORT", "TOLLGATE_OPEN_PORT", 0),
  ...together("TOLLGATE_REMOTE_SIGNER_ADDRESS", "TOLLGATE_REMOTE_SIGNER_URL"),
  rule("TOLLGATE_SIGNER_KEY", "TOLLGATE_REMOTE_SIGNER_URL", (v) => {
    const [isLocal, isRemote] = [v.TOLLGATE_SIGNER_KEY !== null, v.TOLLGATE_REMOTE_SIGNER_URL !== null];
    if (isLocal && isRemote) return "must be unset when TOLLGATE_REMOTE_SIGNER_URL is set: only one of them can sign";
    return !isLocal && !isRemote && "must be set (or TOLLGATE_REMOTE_SIGNER_URL)";
  }),
];

type PortVariable = "TOLLGATE_PORT" | "TOLLGATE_OPEN_PORT" | "TOLLGATE_METRICS_PORT";

/** Two variables must not name one port. Port 0 takes a free port, so it is never equal to another. */
function otherPort(name: PortVariable, other: PortVariable, fallback: number): ConfigRule {
  const isSame = (v: ConfigValues) => v[name] !== 0 && v[name] === (v[other] ?? fallback);
  return rule(name, other, (v) => isSame(v) && `must differ from the port of ${other}`);
}

function required(name: VariableName): ConfigRule {
  return rule(name, null, (v) => v[name] === null && "must be set");
}

/** A variable that must be set with the other. */
function needed(name: VariableName, other: VariableName, why = `must be set when ${other} is`): ConfigRule {
  return rule(name, other, (v) => v[name] === null && v[other] !== null && why);
}

/** A variable that has no meaning without the other. */
function requires(name: VariableName, other: VariableName, why?: string): ConfigRule {
  const must = why ?? `has no effect without ${other}: unset it, or set ${other} too`;
  return rule(name, other, (v) => v[name] !== null && v[other] === null && must);
}

function together(name: VariableName, other: VariableName): ConfigRule[] {
  return [needed(name, other), requires(name, other)];
}

const DATA_DIR_MUST = "must be a directory that tollgate can create and write to";

/** False when the directory exists and is writable, or can be created. Changes nothing. */
function dataDirProblem(path: string): string | false {
  let at = resolve(path);
  // A path below a file, or in a directory that this process may not read, does not exist for it.
  while (!existsSync(at)) at = dirname(at);
  if (!statSync(at).isDirectory()) return `${DATA_DIR_MUST}: ${at} is not a directory`;
  try {
    accessSync(at, constants.R_OK | constants.W_OK | constants.X_OK);
    return false;
  } catch (error) {
    return `${DATA_DIR_MUST}: ${at} is not writable: ${systemReason(error)}`;
  }
}
