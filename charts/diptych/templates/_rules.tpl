{{/*
All that the operator may do to the namespaces it serves: one list, which the ClusterRole of scope
"cluster" and the Roles of scope "namespaced" share.
*/}}
{{- define "diptych.operatorRules" -}}
- apiGroups: [diptych.dev]
  resources: [inferenceservices, modelroutes]
  verbs: [get, list, watch]
# The specification is its users'; the operator writes only the status.
- apiGroups: [diptych.dev]
  resources: [inferenceservices/status, modelroutes/status]
  verbs: [patch]
# Where the cluster enforces it, nobody may name an owner that blocks deletion without this right.
- apiGroups: [diptych.dev]
  resources: [inferenceservices/finalizers, modelroutes/finalizers]
  verbs: [update]
# Their size is for others to set: there is no right to change it once they are made.
- apiGroups: [diptych.dev]
  resources: [poolscalers]
  verbs: [get, list, watch, create, delete]
- apiGroups: [diptych.dev]
  resources: [poolscalers/status]
  verbs: [patch]
- apiGroups: [apps]
  resources: [deployments, daemonsets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services, configmaps, serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [disaggregatedset.x-k8s.io]
  resources: [disaggregatedsets]
  verbs: [get, list, watch, create, patch, delete]
# By name only: a list or a watch would carry every Secret of the namespace. Patched to own again
# what an earlier service of the same name left.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create, patch, delete]
# Patched for the annotation that says which pod a scale-down should take.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, patch]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
# Who serves a namespace by itself: an operator of the whole cluster leaves it alone.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [diptych-operator]
  verbs: [get]
{{- end -}}
