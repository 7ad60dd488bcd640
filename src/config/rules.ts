// What the variables must be together: the rules of each service, reported with the problems of single variables.
import { accessSync, constants, statSync } from "node:fs";
import { dirname, resolve } from "node:path";
import { isKeyOf } from "./pem.ts";
import type { COMMON, DEMO, FACILITATOR, GATEWAY, VariableRow } from "./variables.ts";

export const GATEWAY_PORT = 8080;
export const FACILITATOR_PORT = 8443;

type Table = typeof COMMON & typeof GATEWAY & typeof FACILITATOR & typeof DEMO;
export type VariableName = keyof Table;
/** Variables of the other service have their defaults, whatever is set. */
export type ConfigValues = {
  [N in VariableName]: Table[N] extends VariableRow<infer T, infer F, string> ? T | F : never;
};

export interface ConfigRule {
  /** The variable that the rule is about. If it, or the other one, is wrong by itself, the rule says nothing. */
  readonly name: VariableName;
  readonly other?: VariableName;
  readonly problem: (values: ConfigValues) => string | null;
}

export const MODE_RULES: readonly ConfigRule[] = [
  {
    name: "TOLLGATE_MODE",
    problem: (v) => (v.TOLLGATE_MODE === null ? "must be gateway or facilitator (or give --mode)" : null),
  },
];

export const COMMON_RULES: readonly ConfigRule[] = [
  {
    name: "TOLLGATE_DATA_DIR",
    other: "DATABASE_URL",
    problem: (v) => (v.DATABASE_URL === null ? checkDataDir(v.TOLLGATE_DATA_DIR) : null),
  },
];

export const BACKUP_RULES: readonly ConfigRule[] = [
  {
    name: "DATABASE_URL",
    problem: (v) =>
      v.DATABASE_URL === null
        ? null
        : "must be unset: Postgres is backed up by its own tools, see tollgate help operations",
  },
];

export const GATEWAY_RULES: readonly ConfigRule[] = [
  otherPort("TOLLGATE_METRICS_PORT", "TOLLGATE_PORT", GATEWAY_PORT),
  {
    name: "TOLLGATE_MASTER_KEY",
    other: "DATABASE_URL",
    problem: (v) =>
      v.DATABASE_URL !== null && v.TOLLGATE_MASTER_KEY === null
        ? "must be set when DATABASE_URL is: replicas share it"
        : null,
  },
  {
    name: "TOLLGATE_LISTEN_URL",
    other: "DATABASE_URL",
    problem: (v) =>
      v.TOLLGATE_LISTEN_URL !== null && v.DATABASE_URL === null
        ? "must be unset without DATABASE_URL: it is a URL of the same database"
        : null,
  },
  {
    name: "TOLLGATE_REUSE_PORT",
    other: "DATABASE_URL",
    problem: (v) =>
      v.TOLLGATE_REUSE_PORT === "1" && v.DATABASE_URL === null
        ? "must be 0 without DATABASE_URL: only one gateway can use an SQLite database"
        : null,
  },
  {
    name: "TOLLGATE_OIDC_AUDIENCE",
    other: "TOLLGATE_OIDC_ISSUER",
    problem: (v) => together(v.TOLLGATE_OIDC_AUDIENCE, v.TOLLGATE_OIDC_ISSUER, "TOLLGATE_OIDC_ISSUER"),
  },
  {
    name: "TOLLGATE_JWKS_URL",
    other: "TOLLGATE_OIDC_ISSUER",
    problem: (v) =>
      v.TOLLGATE_JWKS_URL !== null && v.TOLLGATE_OIDC_ISSUER === null
        ? "must be unset, or TOLLGATE_OIDC_ISSUER set too"
        : null,
  },
  {
    name: "TOLLGATE_VAULT_TOKEN",
    other: "TOLLGATE_VAULT_ADDR",
    problem: (v) => together(v.TOLLGATE_VAULT_TOKEN, v.TOLLGATE_VAULT_ADDR, "TOLLGATE_VAULT_ADDR"),
  },
  {
    name: "TOLLGATE_USER_CLAIM",
    problem: (v) =>
      v.TOLLGATE_USER_CLAIM === v.TOLLGATE_TENANT_CLAIM ? "must not be the claim of TOLLGATE_TENANT_CLAIM" : null,
  },
  {
    name: "TOLLGATE_SCOPE_CLAIM",
    problem: (v) =>
      [v.TOLLGATE_TENANT_CLAIM, v.TOLLGATE_USER_CLAIM].includes(v.TOLLGATE_SCOPE_CLAIM)
        ? "must not be the claim of TOLLGATE_TENANT_CLAIM or TOLLGATE_USER_CLAIM"
        : null,
  },
];

export const FACILITATOR_RULES: readonly ConfigRule[] = [
  required("TOLLGATE_TLS_CERT_FILE"),
  required("TOLLGATE_TLS_KEY_FILE"),
  {
    name: "TOLLGATE_TLS_KEY_FILE",
    other: "TOLLGATE_TLS_CERT_FILE",
    problem: ({ TOLLGATE_TLS_KEY_FILE: key, TOLLGATE_TLS_CERT_FILE: certificates }) =>
      key !== null && certificates !== null && !isKeyOf(key, certificates)
        ? "must hold the key of the first certificate in TOLLGATE_TLS_CERT_FILE"
        : null,
  },
  required("TOLLGATE_CLIENT_CA_FILE"),
  required("TOLLGATE_RPC_URLS"),
  otherPort("TOLLGATE_OPEN_PORT", "TOLLGATE_PORT", FACILITATOR_PORT),
  otherPort("TOLLGATE_METRICS_PORT", "TOLLGATE_PORT", FACILITATOR_PORT),
  otherPort("TOLLGATE_METRICS_PORT", "TOLLGATE_OPEN_PORT", 0),
  {
    name: "TOLLGATE_REMOTE_SIGNER_ADDRESS",
    other: "TOLLGATE_REMOTE_SIGNER_URL",
    problem: (v) =>
      together(v.TOLLGATE_REMOTE_SIGNER_ADDRESS, v.TOLLGATE_REMOTE_SIGNER_URL, "TOLLGATE_REMOTE_SIGNER_URL"),
  },
  {
    name: "TOLLGATE_SIGNER_KEY",
    other: "TOLLGATE_REMOTE_SIGNER_URL",
    problem: ({ TOLLGATE_SIGNER_KEY: keys, TOLLGATE_REMOTE_SIGNER_URL: remote }) => {
      if ((keys === null) !== (remote === null)) return null;
      return keys === null
        ? "must be set (or TOLLGATE_REMOTE_SIGNER_URL)"
        : "must be unset, or TOLLGATE_REMOTE_SIGNER_URL unset";
    },
  },
];

type PortVariable = "TOLLGATE_PORT" | "TOLLGATE_OPEN_PORT" | "TOLLGATE_METRICS_PORT";

/** Two ports of 0 take two free ones, so they are never equal. */
function otherPort(name: PortVariable, other: PortVariable, fallback: number): ConfigRule {
  return {
    name,
    other,
    problem: (v) => (v[name] !== 0 && v[name] === (v[other] ?? fallback) ? `must not be the port of ${other}` : null),
  };
}

function required(name: VariableName): ConfigRule {
  return { name, problem: (values) => (values[name] === null ? "must be set" : null) };
}

/** A variable that is needed with the other, and means nothing without it. */
function together(own: unknown, other: unknown, otherName: string): string | null {
  if ((own === null) === (other === null)) return null;
  return own === null ? `must be set when ${otherName} is` : `must be unset, or ${otherName} set too`;
}

export const DATA_DIR_MUST = "must be a directory that can be created and written";

/** Null when the directory is there and writable, or can be created. Changes nothing. */
function checkDataDir(path: string): string | null {
  for (let at = resolve(path); ; at = dirname(at)) {
    const found = stat(at);
    if (found !== undefined) return found.isDirectory() && isWritable(at) ? null : `${DATA_DIR_MUST} (${at} is not)`;
    if (at === dirname(at)) return DATA_DIR_MUST;
  }
}

/** Undefined also below a file, and where this process may not look. */
function stat(path: string) {
  try {
    return statSync(path);
  } catch {
    return undefined;
  }
}

function isWritable(path: string): boolean {
  try {
    accessSync(path, constants.R_OK | constants.W_OK | constants.X_OK);
    return true;
  } catch {
    return false;
  }
}
