// How receipts are documented.
import { Type } from "@sinclair/typebox";
import { PAGE_QUERY } from "../../http/input.ts";
import { operation } from "../../http/openapi.ts";

export const JSON_LINES = "application/jsonl";

const Receipt = Type.Object(
  {
    receipt: Type.String({
      description:
        "A compact JWS (EdDSA). Its claims name the caller, the call, how it ended, the SHA-256 of both bodies, payment and settlement, and `previous`: the SHA-256 of the tenant's receipt before it.",
    }),
  },
  { $id: "Receipt", additionalProperties: false },
);

const EXAMPLE_JWS =
  "eyJhbGciOiJFZERTQSIsImtpZCI6IjVmMGMiLCJ0eXAiOiJyZWNlaXB0K2p3dCJ9.eyJyZWNlaXB0X2lkIjoicmNwdF8wMTlhYTRkOSJ9.c2lnbmF0dXJl";

export const find = operation({
  tag: "Invocations",
  summary: "Read a trust receipt",
  description:
    "Of a call that has ended, if its agent had `emit_receipts` when it was made. While the payment of an ended call is still open there is none. Check it with `tollgate receipt verify`.",
  path: {
    id: { description: "The invocation's ID.", example: "inv_0199a7c2-6a2b-7d4c-8e01-7b1c2d3e4f50" },
  },
  responses: [{ status: "ok", description: "The receipt.", schema: Receipt, example: { receipt: EXAMPLE_JWS } }],
  errors: ["not_found"],
});

export const list = operation({
  tag: "Invocations",
  summary: "Export trust receipts",
  description:
    "Oldest first, one compact JWS a line. The pages one after the other are the file that `tollgate receipt verify` takes.",
  query: PAGE_QUERY,
  responses: [
    {
      status: "ok",
      description: "One page; empty after the last receipt.",
      mediaType: JSON_LINES,
      schema: Type.String(),
      example: `${EXAMPLE_JWS}\n`,
    },
  ],
  errors: ["invalid_request"],
});
