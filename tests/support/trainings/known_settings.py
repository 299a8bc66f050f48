"""Names that systemd and Slurm know, to check the shipped files on machines without them.

From systemd 252 (``systemd --dump-configuration-items``) and Slurm 22.05 (``sbatch --help`` and its manual page).
"""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Settings by section of a unit file.
SYSTEMD = {
    "Unit": _names(
        """
        After AllowIsolate AssertACPower AssertArchitecture AssertCPUFeature AssertCPUPressure AssertCPUs
        AssertCapability AssertControlGroupController AssertCredential AssertDirectoryNotEmpty AssertEnvironment
        AssertFileIsExecutable AssertFileNotEmpty AssertFirstBoot AssertGroup AssertHost AssertIOPressure
        AssertKernelCommandLine AssertKernelVersion AssertMemory AssertMemoryPressure AssertNeedsUpdate
        AssertOSRelease AssertPathExists AssertPathExistsGlob AssertPathIsDirectory AssertPathIsEncrypted
        AssertPathIsMountPoint AssertPathIsReadWrite AssertPathIsSymbolicLink AssertSecurity AssertUser
        AssertVirtualization Before BindTo BindsTo CollectMode ConditionACPower ConditionArchitecture
        ConditionCPUFeature ConditionCPUPressure ConditionCPUs ConditionCapability ConditionControlGroupController
        ConditionCredential ConditionDirectoryNotEmpty ConditionEnvironment ConditionFileIsExecutable
        ConditionFileNotEmpty ConditionFirmware ConditionFirstBoot ConditionGroup ConditionHost ConditionIOPressure
        ConditionKernelCommandLine ConditionKernelVersion ConditionMemory ConditionMemoryPressure ConditionNeedsUpdate
        ConditionOSRelease ConditionPathExists ConditionPathExistsGlob ConditionPathIsDirectory
        ConditionPathIsEncrypted ConditionPathIsMountPoint ConditionPathIsReadWrite ConditionPathIsSymbolicLink
        ConditionSecurity ConditionUser ConditionVirtualization Conflicts DefaultDependencies Description
        Documentation FailureAction FailureActionExitStatus IgnoreOnIsolate JobRunningTimeoutSec JobTimeoutAction
        JobTimeoutRebootArgument JobTimeoutSec JoinsNamespaceOf OnFailure OnFailureIsolate OnFailureJobMode OnSuccess
        OnSuccessJobMode PartOf PropagateReloadFrom PropagateReloadTo PropagatesReloadTo PropagatesStopTo
        RebootArgument RefuseManualStart RefuseManualStop ReloadPropagatedFrom Requires RequiresMountsFor
        RequiresOverridable Requisite RequisiteOverridable SourcePath StartLimitAction StartLimitBurst
        StartLimitInterval StartLimitIntervalSec StopPropagatedFrom StopWhenUnneeded SuccessAction
        SuccessActionExitStatus Upholds Wants
        """
    ),
    "Service": _names(
        """
        AllowedCPUs AllowedMemoryNodes AmbientCapabilities AppArmorProfile BPFProgram BindPaths BindReadOnlyPaths
        BlockIOAccounting BlockIODeviceWeight BlockIOReadBandwidth BlockIOWeight BlockIOWriteBandwidth BusName
        CPUAccounting CPUAffinity CPUQuota CPUQuotaPeriodSec CPUSchedulingPolicy CPUSchedulingPriority
        CPUSchedulingResetOnFork CPUShares CPUWeight CacheDirectory CacheDirectoryMode CapabilityBoundingSet
        ConfigurationDirectory ConfigurationDirectoryMode CoredumpFilter DefaultMemoryLow DefaultMemoryMin Delegate
        DeviceAllow DevicePolicy DisableControllers DynamicUser Environment EnvironmentFile ExecCondition ExecPaths
        ExecReload ExecSearchPath ExecStart ExecStartPost ExecStartPre ExecStop ExecStopPost ExitType
        ExtensionDirectories ExtensionImages FailureAction FileDescriptorStoreMax FinalKillSignal Group GuessMainPID
        IOAccounting IODeviceLatencyTargetSec IODeviceWeight IOReadBandwidthMax IOReadIOPSMax IOSchedulingClass
        IOSchedulingPriority IOWeight IOWriteBandwidthMax IOWriteIOPSMax IPAccounting IPAddressAllow IPAddressDeny
        IPCNamespacePath IPEgressFilterPath IPIngressFilterPath IgnoreSIGPIPE InaccessibleDirectories
        InaccessiblePaths KeyringMode KillMode KillSignal LimitAS LimitCORE LimitCPU LimitDATA LimitFSIZE LimitLOCKS
        LimitMEMLOCK LimitMSGQUEUE LimitNICE LimitNOFILE LimitNPROC LimitRSS LimitRTPRIO LimitRTTIME LimitSIGPENDING
        LimitSTACK LoadCredential LoadCredentialEncrypted LockPersonality LogExtraFields LogLevelMax LogNamespace
        LogRateLimitBurst LogRateLimitIntervalSec LogsDirectory LogsDirectoryMode ManagedOOMMemoryPressure
        ManagedOOMMemoryPressureLimit ManagedOOMPreference ManagedOOMSwap MemoryAccounting MemoryDenyWriteExecute
        MemoryHigh MemoryLimit MemoryLow MemoryMax MemoryMin MemorySwapMax MountAPIVFS MountFlags MountImages NUMAMask
        NUMAPolicy NetworkNamespacePath Nice NoExecPaths NoNewPrivileges NonBlocking NotifyAccess OOMPolicy
        OOMScoreAdjust PAMName PIDFile PassEnvironment PermissionsStartOnly Personality PrivateDevices PrivateIPC
        PrivateMounts PrivateNetwork PrivateTmp PrivateUsers ProcSubset ProtectClock ProtectControlGroups ProtectHome
        ProtectHostname ProtectKernelLogs ProtectKernelModules ProtectKernelTunables ProtectProc ProtectSystem
        ReadOnlyDirectories ReadOnlyPaths ReadWriteDirectories ReadWritePaths RebootArgument RemainAfterExit RemoveIPC
        Restart RestartForceExitStatus RestartKillSignal RestartPreventExitStatus RestartSec RestrictAddressFamilies
        RestrictFileSystems RestrictNamespaces RestrictNetworkInterfaces RestrictRealtime RestrictSUIDSGID
        RootDirectory RootDirectoryStartOnly RootHash RootHashSignature RootImage RootImageOptions RootVerity
        RuntimeDirectory RuntimeDirectoryMode RuntimeDirectoryPreserve RuntimeMaxSec RuntimeRandomizedExtraSec
        SELinuxContext SecureBits SendSIGHUP SendSIGKILL SetCredential SetCredentialEncrypted Slice SmackProcessLabel
        SocketBindAllow SocketBindDeny Sockets StandardError StandardInput StandardInputData StandardInputText
        StandardOutput StartLimitAction StartLimitBurst StartLimitInterval StartupAllowedCPUs
        StartupAllowedMemoryNodes StartupBlockIOWeight StartupCPUShares StartupCPUWeight StartupIOWeight
        StateDirectory StateDirectoryMode SuccessExitStatus SupplementaryGroups SyslogFacility SyslogIdentifier
        SyslogLevel SyslogLevelPrefix SystemCallArchitectures SystemCallErrorNumber SystemCallFilter SystemCallLog
        TTYColumns TTYPath TTYReset TTYRows TTYVHangup TTYVTDisallocate TasksAccounting TasksMax TemporaryFileSystem
        TimeoutAbortSec TimeoutCleanSec TimeoutSec TimeoutStartFailureMode TimeoutStartSec TimeoutStopFailureMode
        TimeoutStopSec TimerSlackNSec Type UMask USBFunctionDescriptors USBFunctionStrings UnsetEnvironment User
        UtmpIdentifier UtmpMode WatchdogSec WatchdogSignal WorkingDirectory
        """
    ),
    "Install": _names(
        """
        Alias Also DefaultInstance RequiredBy WantedBy
        """
    ),
}

#: Long options of sbatch.
SBATCH = _names(
    """
    account array bb bbf begin chdir cluster-constraint clusters comment constraint container contiguous core-spec
    cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error exclude
    exclusive export export-file extra-node-info get-user-env gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket
    gpus-per-task gres gres-flags help hold ignore-pbs input job-name licenses mail-type mail-user mcs-label mem mem-
    per-cpu mem-per-gpu mincpus nice no-kill no-requeue nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-node
    ntasks-per-socket open-mode output overcommit oversubscribe parsable partition power priority profile propagate
    qos quiet reboot requeue reservation signal sockets-per-node spread-job switches thread-spec threads-per-core time
    time-min tmp uid usage use-min-nodes verbose version wait wckey wrap
    """
)
